"""The summary of a run, in constant memory: counts, labels, tokens, latencies, agreement with gold."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pagemill.producer.dataset.label_columns import as_label
from pagemill.producer.dataset.labels.calibration import Calibration, macro_f1
from pagemill.producer.dataset.labels.stages import StageFigures
from pagemill.producer.dataset.record import Totals
from pagemill.producer.dataset.steps.figures import StepFigures
from pagemill.producer.dataset.tables.rows import Row
from pagemill.producer.dataset.tables.writers import META

MAX_LABELS = 50
MAX_LABEL_CHARACTERS = 80
MAX_CONFUSION = 2_500
RESERVOIR = 10_000
OTHER = "(other)"
SAMPLES = 10
MAX_SAMPLE_CHARACTERS = 300


class Distribution:
    """Quantiles of many values from a uniform sample of them (Vitter's algorithm R)."""

    def __init__(self) -> None:
        self.count = 0
        self._values: list[float] = []
        self._random = random.Random(0)

    def add(self, value: float | None) -> None:
        if value is None:
            return
        self.count += 1
        if len(self._values) < RESERVOIR:
            self._values.append(value)
        elif (place := self._random.randrange(self.count)) < RESERVOIR:
            self._values[place] = value

    def quantile(self, share: float) -> float | None:
        """Return the value that `share` of the values are at or below; None without values."""
        if not self._values:
            return None
        ordered = sorted(self._values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def as_json(self) -> dict[str, float | None]:
        return {name: self.quantile(share) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}


class LabelCounts:
    """The count of each output; beyond MAX_LABELS distinct ones, as in free text, they count as OTHER."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, label: str) -> None:
        if label not in self._counts and len(self._counts) >= MAX_LABELS:
            label = OTHER
        self._counts[label] += 1

    @property
    def are_labels(self) -> bool:
        """True if the outputs look like labels: few distinct ones, each short."""
        return bool(self._counts) and OTHER not in self._counts

    def as_json(self) -> dict[str, int]:
        return dict(self._counts.most_common())


@dataclass
class Summary:
    """The report's counts. rows = succeeded + failed + skipped + unfinished; failed = the sum of `error_codes`."""

    rows: int = 0
    succeeded: int = 0
    failed: int = 0
    unfinished: int = 0
    skipped: int = 0
    """Rows left out by `on_null` and `on_empty`."""
    skip_codes: Counter[str] = field(default_factory=Counter)
    merged: int = 0
    """Rows served by another row's job."""
    adopted: int = 0
    """Rows taken from an existing output."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    totals: Totals = field(default_factory=Totals)
    """Wall-clock time and KV use, summed over all starts that made the output."""
    schema_valid: int = 0
    """Rows whose output parsed as the requested shape."""
    wants_schema: bool = False
    price_per_hour: float | None = None
    error_codes: Counter[str] = field(default_factory=Counter)
    first_failure: str | None = None
    """Row, code and reason of the first failure, which is often the cause of all."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    labels: LabelCounts = field(default_factory=LabelCounts)
    confusion: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(gold, output) -> rows; pairs beyond its size limit are lumped together."""
    gold: str | None = None
    compared: int = 0
    agreed: int = 0
    calibration: Calibration | None = None
    """For a run with `label_probs` and one model; a cascade has one for each stage."""
    stages: StageFigures | None = None
    """For a cascade."""
    steps: StepFigures | None = None
    """For a recipe."""
    ttft_s: Distribution = field(default_factory=Distribution)
    e2e_s: Distribution = field(default_factory=Distribution)
    output_tokens: Distribution = field(default_factory=Distribution)
    prompt_lengths: Distribution = field(default_factory=Distribution)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Some rows with their outputs, drawn uniformly, in the rows' order."""
    draws: random.Random = field(default_factory=lambda: random.Random(0), repr=False)
    frame: Any = None
    """The rows of a data frame with their outputs, as a frame of the same kind; see `Pipeline.run`."""

    def add_success(self, kept: dict[str, Any], output: Any, gold: Any, *, is_merged: bool) -> None:
        """Add one row with its output. The tokens of a job that serves several rows count once."""
        self.rows += 1
        self.succeeded += 1
        is_adopted = "timing" not in kept
        self.adopted += is_adopted
        samples = kept.get("outputs") or [{}]
        self.finish_reasons.update(str(sample.get("finish_reason")) for sample in samples)
        self.schema_valid += all(sample.get("parsed") is not None for sample in samples)
        usage, timing = kept.get("usage") or {}, kept.get("timing") or {}
        if is_merged:
            self.merged += 1
        else:
            self.prompt_tokens += usage.get("prompt_tokens", 0)
            self.completion_tokens += usage.get("completion_tokens", 0)
            self.cached_tokens += usage.get("cached_tokens", 0)
            self.ttft_s.add(timing.get("ttft_s"))
            self.e2e_s.add(timing.get("e2e_s"))
            self.output_tokens.add(usage.get("completion_tokens"))
            self.prompt_lengths.add(usage.get("prompt_tokens"))
        if self.stages is not None:
            gold_label = None if self.gold is None or gold is None else as_label(gold)
            self.stages.add(kept["answers"], gold_label, is_merged=is_merged)
        text = as_label(output)
        self.labels.add(text if len(text) <= MAX_LABEL_CHARACTERS else OTHER)
        if self.gold is not None and gold is not None:
            self._compare(as_label(gold), text)

    def add_confidence(self, label: str, prob: float, gold: Any) -> None:
        """Add the probability of a row's label."""
        if self.calibration is not None:
            self.calibration.bins.add(prob, is_right=as_label(gold) == as_label(label))

    def add_sample(self, row: Row, output: Any) -> None:
        """Add a row to the report's sample at random, to be called before `add_success` (Vitter's algorithm R)."""
        place = self.succeeded
        if place >= SAMPLES and (place := self.draws.randrange(self.succeeded + 1)) >= SAMPLES:
            return
        if len(self.samples) == SAMPLES:
            del self.samples[place]
        shown = {name: _shortened(value) for name, value in (row.fields or {}).items() if name != META}
        self.samples.append({"row": row.number, "input": shown, "output": _shortened(output)})

    def _compare(self, gold: str, output: str) -> None:
        self.compared += 1
        self.agreed += gold == output
        is_kept = (gold, output) in self.confusion or len(self.confusion) < MAX_CONFUSION
        self.confusion[(gold, output) if is_kept else (OTHER, OTHER)] += 1

    def add_failure(self, row: int | str, code: str, message: str) -> None:
        if self.first_failure is None:
            self.first_failure = f"row {row}: {code}: {message}"
        self.rows += 1
        self.failed += 1
        self.error_codes[code] += 1

    def add_skipped(self, code: str) -> None:
        self.rows += 1
        self.skipped += 1
        self.skip_codes[code] += 1

    def add_unfinished(self) -> None:
        self.rows += 1
        self.unfinished += 1

    @property
    def failed_steps(self) -> int:
        """Return the number of a recipe's rows with a line in the output in which a step has failed."""
        return 0 if self.steps is None else self.steps.failed

    @property
    def accuracy(self) -> float | None:
        """Return the share of rows with a gold value whose output equals it."""
        return self.agreed / self.compared if self.compared else None

    @property
    def macro_f1(self) -> float | None:
        """Return the mean of the labels' F1; None without gold values, or with too many different ones."""
        return None if (OTHER, OTHER) in self.confusion else macro_f1(self.confusion)

    @property
    def seconds(self) -> float:
        return self.totals.seconds

    @property
    def kv_utilization(self) -> float | None:
        """Return the mean share of the KV blocks in use, as far as observed."""
        return self.totals.kv_utilization.value

    @property
    def kv_waste(self) -> float | None:
        """Return the mean share of slots without a token in the blocks in use."""
        return self.totals.kv_waste.value

    @property
    def timed(self) -> int:
        """Return the rows done in starts with known time: all, except for an output without a record."""
        return max(0, self.succeeded - self.totals.untimed_rows)

    @property
    def rows_per_second(self) -> float | None:
        return self._per_second(self.timed)

    @property
    def cost(self) -> float | None:
        return None if self.price_per_hour is None else self.price_per_hour * self.seconds / 3600

    def _per_second(self, count: int) -> float | None:
        return max(0, count) / self.seconds if self.seconds else None

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "unfinished": self.unfinished,
            "skipped": self.skipped,
            "cut_off": self.error_codes["output_cut_off"],
            "merged": self.merged,
            "adopted": self.adopted,
            "seconds": round(self.seconds, 3),
            "starts": self.totals.starts,
            "rows_per_second": self.rows_per_second,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "cache_hit_ratio": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
            "completion_tokens_per_second": self._per_second(
                self.completion_tokens - self.totals.untimed_tokens
            ),
            "cost": self.cost,
            "kv_utilization": self.kv_utilization,
            "kv_waste": self.kv_waste,
            "schema_valid_ratio": self.schema_valid / self.succeeded
            if self.wants_schema and self.succeeded
            else None,
            "error_codes": dict(self.error_codes.most_common()),
            "first_failure": self.first_failure,
            "finish_reasons": dict(self.finish_reasons.most_common()),
            "labels": self.labels.as_json() if self.labels.are_labels else None,
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "calibration": None if self.calibration is None else self.calibration.as_json(),
            "cascade": None if self.stages is None else self.stages.as_json(),
            "steps": None if self.steps is None else self.steps.as_json(),
            "confusion": [
                {"gold": gold, "output": output, "rows": count}
                for (gold, output), count in self.confusion.most_common()
            ],
            "samples": self.samples,
            "ttft_s": self.ttft_s.as_json(),
            "e2e_s": self.e2e_s.as_json(),
            "prompt_tokens_per_row": self.prompt_lengths.as_json(),
            "completion_tokens_per_row": self.output_tokens.as_json(),
        }


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SAMPLE_CHARACTERS else f"{text[:MAX_SAMPLE_CHARACTERS]}..."
