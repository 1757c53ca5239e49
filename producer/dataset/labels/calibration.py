"""Agreement of label probabilities with gold values, in constant memory, and the calibrating temperature."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.producer.dataset.label_columns import scaled

BINS = 15
"""The number used by Guo et al., 2017."""
MAX_ROWS = 10_000
"""Maximum number of rows to fit a temperature on, a uniform sample of all..."""
MAX_NUMBERS = 400_000
"""...with this maximum of probabilities: the fit takes one or two seconds."""
COLDEST, HOTTEST = 0.05, 20.0
"""The range of temperatures that a fit can return."""


@dataclass(slots=True)
class Reliability:
    """Rows by their label's probability, in BINS of equal width; a probability on a bound is in the lower bin."""

    rows: list[int] = field(default_factory=lambda: [0] * BINS)
    right: list[int] = field(default_factory=lambda: [0] * BINS)
    confidence: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Sums of the labels' probabilities."""

    def add(self, prob: float, *, is_right: bool) -> None:
        index = min(BINS - 1, max(0, math.ceil(prob * BINS) - 1))
        self.rows[index] += 1
        self.right[index] += is_right
        self.confidence[index] += prob

    @property
    def error(self) -> float | None:
        """Return the expected calibration error: the gap of accuracy and mean probability per bin, averaged."""
        total = sum(self.rows)
        gaps = (abs(right - sure) for right, sure in zip(self.right, self.confidence, strict=True))
        return math.fsum(gaps) / total if total else None

    def as_json(self) -> list[dict[str, Any]]:
        """Return the bins that have rows."""
        return [
            {
                "from": index / BINS,
                "to": (index + 1) / BINS,
                "rows": rows,
                "accuracy": self.right[index] / rows,
                "confidence": self.confidence[index] / rows,
            }
            for index, rows in enumerate(self.rows)
            if rows
        ]


class GoldSample:
    """A uniform sample of rows with their gold label, to fit a temperature on (Vitter's algorithm R)."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: list[tuple[str, Mapping[str, float]]] = []
        self._draws = random.Random(0)

    def add(self, gold: str, probs: Mapping[str, float]) -> None:
        """Add a row; one whose gold value is not a label is left out."""
        if gold not in probs:
            return
        self.count += 1
        if len(self._rows) < min(MAX_ROWS, MAX_NUMBERS // len(probs)):
            self._rows.append((gold, probs))
        elif (place := self._draws.randrange(self.count)) < len(self._rows):
            self._rows[place] = gold, probs

    def fit(self) -> float | None:
        """Return the temperature at which the gold labels are most probable; None without rows.

        The mean log-loss is convex in 1 / temperature, so its minimum is where the slope changes its sign. If there is
        none between COLDEST and HOTTEST (for example, every row is right), the nearer bound is returned.
        """
        if not self._rows:
            return None
        rows = [_logs(gold, probs) for gold, probs in self._rows]

        def slope(inverse: float) -> float:
            return math.fsum(_slope(*row, inverse) for row in rows)

        if slope(1.0) == 0.0:
            return 1.0
        low, high = math.log(1.0 / HOTTEST), math.log(1.0 / COLDEST)
        while high - low > 1e-4:
            middle = (low + high) / 2
            if slope(math.exp(middle)) <= 0:
                low = middle
            else:
                high = middle
        return round(math.exp(-(low + high) / 2), 3)

    def error(self, temperature: float) -> float | None:
        """Return the expected calibration error of these rows at a temperature; None without rows."""
        bins = Reliability()
        for gold, probs in self._rows:
            changed = scaled(probs, temperature)
            label = max(changed, key=changed.__getitem__)
            bins.add(changed[label], is_right=label == gold)
        return bins.error


@dataclass(slots=True)
class Calibration:
    """The calibration of a run: `bins` are of the written probabilities, at temperature `applied`."""

    sample: GoldSample
    fitted: float | None
    """The temperature that fits the gold values best; None without gold values."""
    applied: float
    bins: Reliability = field(default_factory=Reliability)

    def as_json(self) -> dict[str, Any] | None:
        """Return the calibration as JSON; None without gold values."""
        if self.fitted is None:
            return None
        return {
            "expected_calibration_error": self.bins.error,
            "temperature": self.applied,
            "fitted_temperature": self.fitted,
            "error_at_fitted_temperature": self.sample.error(self.fitted),
            "bins": self.bins.as_json(),
        }


def macro_f1(confusion: Mapping[tuple[str, str], int]) -> float | None:
    """Return the mean over labels of F1, 2 TP / (2 TP + FP + FN), for those that occur as a gold value or an output.

    `confusion`: (gold, output) -> rows. None if it is empty.
    """
    right: dict[str, int] = {}
    seen: dict[str, int] = {}
    for (gold, output), count in confusion.items():
        for label in (gold, output):
            seen[label] = seen.get(label, 0) + count
        if gold == output:
            right[gold] = right.get(gold, 0) + count
    return math.fsum(2 * right.get(label, 0) / seen[label] for label in seen) / len(seen) if seen else None


def _logs(gold: str, probs: Mapping[str, float]) -> tuple[float, Sequence[float]]:
    """Return the log of the gold label's probability, and of all; those of 0 as the smallest float."""
    logs = {label: math.log(max(p, 5e-324)) for label, p in probs.items()}
    return logs[gold], list(logs.values())


def _slope(gold: float, logs: Sequence[float], inverse: float) -> float:
    """Return the derivative of a row's log-loss by 1 / temperature."""
    peak = max(logs) * inverse
    weights = [math.exp(value * inverse - peak) for value in logs]
    mean = math.fsum(weight * value for weight, value in zip(weights, logs, strict=True)) / math.fsum(weights)
    return mean - gold
