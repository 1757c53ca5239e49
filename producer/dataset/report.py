"""A run's report: on the terminal, as JSON, or as one self-contained HTML file."""

from __future__ import annotations

import datetime
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from pagemill.common.plain_text import escaped
from pagemill.producer.dataset.summary import Summary

BAR_WIDTH = 30
CURVE_COLUMNS = ("margin", "passed on", "right", "tokens per row", "seconds per row", "rows known")


def figures(summary: Summary) -> list[tuple[str, str]]:
    """Return the report's lines as (name, value)."""
    facts = summary.as_json()
    starts = f" in {summary.totals.starts} starts" if summary.totals.starts > 1 else ""
    lines = [
        ("rows", f"{summary.rows:,} = {summary.succeeded:,} done + {summary.failed:,} failed"),
        ("time", f"{_duration(summary.seconds)}{starts}, {_number(facts['rows_per_second'])} rows/s"),
        ("tokens", f"{summary.prompt_tokens:,} prompt + {summary.completion_tokens:,} output, "
                   f"{_number(facts['completion_tokens_per_second'])} output tokens/s"),
        ("prefix-cache hits", _percent(facts["cache_hit_ratio"])),
    ]  # fmt: skip
    if summary.kv_utilization is not None:
        waste = f", {_percent(summary.kv_waste)} of their slots empty" if summary.kv_waste is not None else ""
        lines.append(("KV blocks in use", f"{_percent(summary.kv_utilization)} (mean){waste}"))
    if summary.skipped:
        lines[0] = ("rows", lines[0][1] + f" + {summary.skipped:,} skipped")
    if summary.unfinished:
        lines[0] = ("rows", lines[0][1] + f" + {summary.unfinished:,} unfinished")
    if summary.adopted:
        made = summary.succeeded - summary.adopted
        untimed = (
            f"; the time of {summary.totals.untimed_rows:,} is not known"
            if summary.totals.untimed_rows
            else ""
        )
        lines.append(("of these", f"{made:,} new, {summary.adopted:,} from the earlier output{untimed}"))
    if summary.merged:
        lines.append(("served by an equal row's run", f"{summary.merged:,}"))
    if summary.cost is not None:
        per_thousand = 1000 * summary.cost / summary.timed if summary.timed else 0.0
        lines.append(("cost", f"{summary.cost:.4f}, {per_thousand:.4f} per 1,000 rows"))
    if summary.wants_schema:
        lines.append(("valid outputs", _percent(facts["schema_valid_ratio"])))
    if summary.accuracy is not None:
        lines.append((f"equal to {summary.gold}", _percent(summary.accuracy)))
        if summary.labels.are_labels and summary.macro_f1 is not None:
            lines.append(("macro F1", f"{summary.macro_f1:.3f}"))
    if (calibration := facts["calibration"]) is not None:
        lines.append(("calibration error", _calibration(calibration)))
    if (cascade := facts["cascade"]) is not None:
        lines += [line for number, stage in enumerate(cascade["stages"], 1) for line in _stage(number, stage)]
    lines += [line for step in facts["steps"] or () for line in _recipe_step(step)]
    if summary.e2e_s.count:
        e2e = facts["e2e_s"]
        lines.append(
            ("submit to end", f"p50 {e2e['p50']:.2f} s, p90 {e2e['p90']:.2f} s, p99 {e2e['p99']:.2f} s")
        )
    lines += [(f"failed: {code}", f"{count:,}") for code, count in summary.error_codes.most_common()]
    lines += [(f"skipped: {code}", f"{count:,}") for code, count in summary.skip_codes.most_common()]
    return lines


def write_json(summary: Summary, path: Path, about: dict[str, Any]) -> None:
    path.write_text(json.dumps({**about, **summary.as_json()}, indent=2, ensure_ascii=False) + "\n")


def write_html(summary: Summary, path: Path, about: dict[str, Any]) -> None:
    """Write one self-contained page. All text from the data is escaped."""
    source = files("pagemill.producer.dataset").joinpath("report.html.j2").read_text()
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    facts = summary.as_json()
    charts = [
        ("Labels", list((facts["labels"] or {}).items())),
        ("Why outputs ended", list(facts["finish_reasons"].items())),
        ("Failures", list(facts["error_codes"].items())),
    ]
    quantiles = [
        ("submit to end (s)", facts["e2e_s"]),
        ("start to first token (s)", facts["ttft_s"]),
        ("prompt tokens", facts["prompt_tokens_per_row"]),
        ("output tokens", facts["completion_tokens_per_row"]),
    ]
    path.write_text(
        template.render(
            about=about,
            figures=figures(summary),
            charts=[(title, bars, max(count for _, count in bars)) for title, bars in charts if bars],
            quantiles=[(name, values) for name, values in quantiles if values["p50"] is not None],
            confusion=_matrix(summary),
            cascade=facts["cascade"],
            curve=_drawn(facts["cascade"]),
            curve_columns=CURVE_COLUMNS,
            shown_points=curve_rows(summary),
            calibrations=[
                *([("", facts["calibration"])] if facts["calibration"] else []),
                *(
                    (f" of {stage['model']}", stage["calibration"])
                    for stage in _stages(facts)
                    if stage["calibration"]
                ),
            ],
            samples=summary.samples,
            written=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        ),
        encoding="utf-8",
    )


def bars(counts: dict[str, int], block: str = "█") -> list[tuple[str, str, int]]:
    """Return (label, bar of blocks, count) for the terminal."""
    most = max(counts.values(), default=1)
    return [(escaped(label), block * max(1, round(BAR_WIDTH * n / most)), n) for label, n in counts.items()]


def curve_rows(summary: Summary) -> list[list[str]]:
    """Return some points of a cascade's curve as cells; none for a run with one model."""
    if summary.stages is None:
        return []
    used = summary.stages.below
    return [
        [
            f"{point['below']:g}{' (this run)' if point['below'] == used else ''}",
            _percent(point["share"]),
            _percent(point["accuracy"]),
            _number(point["tokens"]),
            "-" if point["seconds"] is None else f"{point['seconds']:.3f}",
            _percent(point["covered"]),
        ]
        for point in summary.stages.curve.points()
        if point["below"] == used or round(point["below"] * 100) % 10 == 0
    ]


def _stages(facts: dict[str, Any]) -> list[dict[str, Any]]:
    stages: list[dict[str, Any]] = (facts["cascade"] or {}).get("stages", [])
    return stages


def _stage(number: int, stage: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of one stage of a cascade."""
    tokens = stage["prompt_tokens"] + stage["completion_tokens"]
    parts = [f"{stage['rows']:,} rows ({_percent(stage['share'])}), {stage['final']:,} answers kept"]
    if stage["accuracy_final"] is not None:
        parts[0] += f", {_percent(stage['accuracy_final'])} right"
    if stage["accuracy_passed_on"] is not None:
        parts.append(f"{_percent(stage['accuracy_passed_on'])} right of those passed on")
    parts.append(f"{tokens:,} tokens")
    if stage["seconds"] is not None:
        parts.append(f"{stage['seconds'] / stage['timed_jobs']:.3f} s a job")
    lines = [(f"stage {number}: {stage['model']}", "; ".join(parts))]
    if stage["calibration"] is not None:
        lines.append((f"stage {number}: calibration error", _calibration(stage["calibration"])))
    return lines + [
        (f"stage {number}: failed: {code}", f"{count:,}") for code, count in stage["failed"].items()
    ]


def _recipe_step(step: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of one step of a recipe."""
    name = f"step {step['name']}"
    parts = [f"{step['rows']:,} rows"]
    if step["skipped"]:
        parts.append(f"{sum(step['skipped'].values()):,} skipped")
    parts.append(f"{step['prompt_tokens']:,} prompt + {step['completion_tokens']:,} output tokens")
    if step["accuracy"] is not None:
        parts.append(f"{_percent(step['accuracy'])} equal to {step['gold']}")
    return [(name, "; ".join(parts))] + [
        (f"{name}: failed: {code}", f"{count:,}") for code, count in step["failed"].items()
    ]


def _drawn(cascade: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the curve as points of a figure of 100 by 50; None without gold values, or if all costs are equal."""
    points = [point for point in (cascade or {}).get("curve", []) if point["accuracy"] is not None]
    if len({point["tokens"] for point in points}) < 2:
        return None
    low, high = min(point["tokens"] for point in points), max(point["tokens"] for point in points)
    bottom, top = (edge(point["accuracy"] for point in points) for edge in (min, max))
    room = max(top - bottom, 0.02)

    def place(point: dict[str, Any]) -> tuple[float, float]:
        across = (point["tokens"] - low) / (high - low)
        return 5 + 90 * across, 45 - 40 * (point["accuracy"] - bottom) / room

    is_known = [point for point in points if point["covered"] == 1.0]
    return {
        "all": [place(point) for point in points],
        "known": [place(point) for point in is_known],
        "marks": [(*place(point), point) for point in points],
        "tokens": (low, high),
        "accuracy": (bottom, bottom + room),
    }


def _matrix(summary: Summary) -> dict[str, Any] | None:
    """Return the confusion matrix: gold values by outputs; None without gold or with too many values."""
    if not summary.confusion:
        return None
    golds = sorted({gold for gold, _ in summary.confusion})
    outputs = sorted({output for _, output in summary.confusion})
    if len(golds) > 50 or len(outputs) > 50:
        return None
    rows = [(gold, [summary.confusion.get((gold, output), 0) for output in outputs]) for gold in golds]
    return {"outputs": outputs, "rows": rows}


def _calibration(facts: dict[str, Any]) -> str:
    """Return the expected calibration error as written, and that with a fitted temperature."""
    text = _percent(facts["expected_calibration_error"])
    if facts["temperature"] != 1.0:
        text += f" at temperature {facts['temperature']:g}"
    if facts["temperature"] != facts["fitted_temperature"]:
        best = _percent(facts["error_at_fitted_temperature"])
        text += f"; {best} at {facts['fitted_temperature']:g}, which fits best"
    return text


def rough_duration(seconds: float) -> str:
    """Return an estimated time in a suitable unit: `36 seconds`, `12 minutes`, `3.4 hours`, `2.1 days`."""
    if seconds < 90:
        return "a second" if seconds < 1.5 else f"{seconds:.0f} seconds"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86_400:,.1f} days"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds))) if seconds >= 60 else f"{seconds:.1f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
