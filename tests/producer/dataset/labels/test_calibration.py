"""Reliability, expected calibration error, macro F1 and fitted temperatures, compared with their definitions."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from pagemill.producer.dataset.label_columns import scaled
from pagemill.producer.dataset.labels.calibration import (
    BINS,
    COLDEST,
    MAX_NUMBERS,
    GoldSample,
    Reliability,
    macro_f1,
)


def drawn(count: int, temperature: float, seed: int = 1) -> list[tuple[str, dict[str, float]]]:
    """Rows whose gold label is drawn from the probabilities at this temperature."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        logits = [draw.gauss(0, 3) for _ in "abcd"]
        total = math.fsum(map(math.exp, logits))
        probs = {label: math.exp(logit) / total for label, logit in zip("abcd", logits, strict=True)}
        true = scaled(probs, temperature)
        rows.append((draw.choices(list(true), list(true.values()))[0], probs))
    return rows


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_fitted_temperature_mends_probabilities_that_are_off(temperature: float) -> None:
    sample = GoldSample()
    for gold, probs in drawn(5000, temperature):
        sample.add(gold, probs)
    fitted = sample.fit()
    assert fitted == pytest.approx(temperature, rel=0.06)
    mended, before = sample.error(fitted), sample.error(1.0)
    assert mended is not None
    assert before is not None
    assert mended < 0.02
    if temperature != 1.0:
        assert mended < before / 3


def test_the_fit_is_the_least_log_loss() -> None:
    sample, rows = GoldSample(), drawn(300, 1.7)
    for gold, probs in rows:
        sample.add(gold, probs)
    fitted = sample.fit()
    assert fitted is not None

    def loss(temperature: float) -> float:
        return -math.fsum(math.log(scaled(probs, temperature)[gold]) for gold, probs in rows)

    assert loss(fitted) <= min(loss(fitted * 1.01), loss(fitted / 1.01))


def test_rows_that_tell_nothing() -> None:
    sample = GoldSample()
    sample.add("unknown", {"a": 0.5, "b": 0.5})
    assert (sample.count, sample.fit(), sample.error(1.0), Reliability().error) == (0, None, None, None)
    sample.add("a", {"a": 0.5, "b": 0.5})
    assert sample.fit() == 1.0
    sample.add("a", {"a": 0.9, "b": 0.1})
    assert sample.fit() == pytest.approx(COLDEST, rel=0.01)  # it is right: no temperature is too cold
    sample.add("b", {"a": 1.0, "b": 0.0})
    assert sample.fit() is not None


def test_the_sample_is_bounded() -> None:
    sample = GoldSample()
    labels = {str(number): 1 / 1000 for number in range(1000)}
    for _ in range(1000):
        sample.add("1", labels)
    assert sample.count == 1000
    assert len(sample._rows) == MAX_NUMBERS // 1000


def test_the_expected_calibration_error_by_hand() -> None:
    bins = Reliability()
    for prob, is_right in ((0.9, True), (0.9, False), (0.91, True), (0.3, False), (1.0, True), (0.0, False)):
        bins.add(prob, is_right=is_right)
    # Bins of 1/15: 0.9 and 0.91 share one, (2 right, 2.71 sure); 0.3 is wrong, 1.0 right, 0.0 wrong.
    assert bins.error == pytest.approx((0.71 + 0.3 + 0.0 + 0.0) / 6)
    assert [(each["rows"], each["accuracy"]) for each in bins.as_json()] == [
        (1, 0.0), (1, 0.0), (3, pytest.approx(2 / 3)), (1, 1.0),
    ]  # fmt: skip
    assert sum(each["rows"] for each in bins.as_json()) == 6
    assert all(each["to"] - each["from"] == pytest.approx(1 / BINS) for each in bins.as_json())


@pytest.mark.parametrize(
    ("confusion", "wanted"),
    [
        ({}, None),
        ({("a", "a"): 3}, 1.0),
        ({("a", "b"): 1}, 0.0),
        ({("a", "a"): 2, ("a", "b"): 1, ("b", "b"): 1}, (4 / 5 + 2 / 3) / 2),
        ({("a", "a"): 1, ("b", "c"): 1}, 1 / 3),
    ],
)
def test_macro_f1_by_hand(confusion: dict[tuple[str, str], int], wanted: Any) -> None:
    assert macro_f1(confusion) == (None if wanted is None else pytest.approx(wanted))


def test_scaling_keeps_the_order_and_can_be_undone() -> None:
    probs = {"a": 0.7, "b": 0.2999999, "c": 1e-7, "d": 0.0}
    warm = scaled(probs, 3.0)
    assert math.fsum(warm.values()) == pytest.approx(1.0)
    assert sorted(warm, key=warm.__getitem__) == sorted(probs, key=probs.__getitem__)
    assert warm["a"] < probs["a"]
    assert scaled(warm, 1 / 3.0) == pytest.approx(probs)
    assert scaled(probs, 0.01)["a"] == pytest.approx(1.0)
    assert scaled({"a": 1.0, "b": 5e-324}, 100.0)["b"] > 1e-4
