"""Rows as a table on the screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.gpu.section import Row

_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "B/s": ((1e9, "GB/s"),),
    "FLOP/s": ((1e12, "TFLOP/s"),),
}
_COLUMNS = ("case", "measured", "floor", "share", "target", "")
_WIDEST_CASE = 60
_HEADLINES = {"tokens_per_s", "jobs_per_s"}


def lines_of(rows: Sequence[Row]) -> Iterator[str]:
    """The rows of a section, incorrect ones first."""
    cells = [list(_COLUMNS)]
    for row in sorted(rows, key=lambda row: row.ok is not False):
        figures = [_figure(number, row.unit) for number in (row.measured, row.floor)]
        share = "" if row.share is None or row.unit != "s" else f"{row.share:.0%}"
        target = "" if row.target is None else f"{row.target:.0%}" if row.unit == "s" else f"{row.target:g}"
        cells.append([row.case[:_WIDEST_CASE], *figures, share, target, _verdict(row)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells if rows else ():
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def summary_of(rows: Sequence[tuple[str, Row]]) -> Iterator[str]:
    """Up to 30 lines of a part's rows, each with its section's name: errors, main results, the worst ratios."""
    wrong = [row for row in rows if row[1].ok is False]
    headlines = [row for row in rows if _HEADLINES & row[1].facts.keys()]
    shares = sorted((row for row in rows if row[1].share is not None), key=lambda row: row[1].share or 0.0)
    for title, some in (
        ("wrong", wrong[:10]),
        ("headlines", headlines[:8]),
        ("furthest from their floors", shares[:9]),
    ):
        if some:
            yield f"{title}:"
            cells = [replace(row, case=f"{name}: {row.case}") for name, row in some]
            yield from list(lines_of(cells))[1:]


def _verdict(row: Row) -> str:
    if row.ok is False:
        return "WRONG"
    facts = ", ".join(f"{name} {value}" for name, value in row.facts.items())
    return ", ".join(filter(None, ["below its target" if row.meets_target is False else "", facts]))


def _figure(number: float | None, unit: str) -> str:
    if number is None or number != number:
        return ""
    scales = _SCALES.get(unit, ((1.0, unit),))
    size, name = next((each for each in scales if number >= each[0]), scales[-1])
    return f"{number / size:.3g} {name}"
