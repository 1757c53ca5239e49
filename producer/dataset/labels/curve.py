"""Accuracy and cost of a cascade at every margin, from one run at one margin, in constant memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

STEPS = 100
_NAMES = ("known", "compared", "right", "tokens", "timed", "seconds")


@dataclass(frozen=True, slots=True)
class Step:
    """One stage's answer to a row, and its cost. `is_right` None: the row has no gold value."""

    prob: float
    is_right: bool | None
    tokens: int
    seconds: float | None
    """The run time of its job; None if unknown."""


class Curve:
    """Sums over rows for margins of 0, 0.01, ... 1 and the one that was used.

    At a margin t a row's answer is that of the first stage whose probability is at least t, or of the last. Up to the
    margin that was used, it is known for every row. Above it, a row that would be passed on, but was not, has no known
    answer: it only counts in `share`, and `covered` is the share with an answer.
    """

    def __init__(self, used: float) -> None:
        self.used = used
        self._margins = sorted({step / STEPS for step in range(STEPS + 1)} | {used})
        # Additions at a margin, minus removals there: adding a row takes time independent of the number of margins.
        self._changes = {name: [0.0] * (len(self._margins) + 1) for name in (*_NAMES, "passed")}
        self._rows = 0

    def add(self, steps: Sequence[Step], *, is_last: bool) -> None:
        """Add a row with its known answers. `is_last`: no margin passes it on from the last of them."""
        self._rows += 1
        start, highest, tokens, seconds = 0, 0.0, 0, 0.0
        is_timed = True
        for index, step in enumerate(steps):
            highest = max(highest, step.prob)
            is_end = is_last and index == len(steps) - 1
            stop = len(self._margins) if is_end else bisect_right(self._margins, highest)
            tokens += step.tokens
            is_timed = is_timed and step.seconds is not None
            seconds += step.seconds or 0.0
            found = (
                1,
                step.is_right is not None,
                bool(step.is_right),
                tokens,
                is_timed,
                is_timed and seconds,
            )
            for name, value in zip(_NAMES, found, strict=True):
                self._change(name, start, stop, value)
            start = stop
        self._change("passed", bisect_right(self._margins, steps[0].prob), len(self._margins), 1)

    def _change(self, name: str, start: int, stop: int, value: float) -> None:
        self._changes[name][start] += value
        self._changes[name][stop] -= value

    def points(self) -> list[dict[str, Any]]:
        """Return a point for each margin.

        `share` of the rows are passed on from the first stage; `covered` is the share of rows whose answer is known.
        Over these rows are `accuracy` (with a gold value), and `tokens` and `seconds`, means per row.
        """
        sums = {name: list(accumulate(changes)) for name, changes in self._changes.items()}
        points = []
        for index, margin in enumerate(self._margins):
            at = {name: values[index] for name, values in sums.items()}
            points.append(
                {
                    "below": margin,
                    "share": _ratio(at["passed"], self._rows),
                    "covered": _ratio(at["known"], self._rows),
                    "accuracy": _ratio(at["right"], at["compared"]),
                    "tokens": _ratio(at["tokens"], at["known"]),
                    "seconds": _ratio(at["seconds"], at["timed"]),
                }
            )
        return points


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
