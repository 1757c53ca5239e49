"""The drain estimate, from readings like those of scrapes."""

from __future__ import annotations

import pytest

from pagemill.monitoring.queue_figures import DrainEstimate, QueueFigures


def reading(at: float, waiting: int, ended: int) -> QueueFigures:
    return QueueFigures(
        queue="q", taken_at=at, waiting={("m", "normal"): waiting}, ended={"succeeded": ended}
    )


def test_the_backlog_over_the_rate_of_ends() -> None:
    drain = DrainEstimate()
    assert drain.update(reading(0.0, waiting=100, ended=0)) is None, "one reading has no rate"
    assert drain.update(reading(10.0, waiting=80, ended=20)) == pytest.approx(40.0)
    assert drain.update(reading(20.0, waiting=40, ended=60)) == pytest.approx(40 / 3)


def test_what_every_outcome_and_state_counts() -> None:
    drain = DrainEstimate()
    drain.update(QueueFigures(queue="q", taken_at=0.0))
    figures = QueueFigures(
        queue="q", taken_at=10.0, waiting={("m", "high"): 1, ("m", "low"): 2}, delayed=3, running=4,
        ended={"failed": 1, "cancelled": 1, "dead": 3},
    )  # fmt: skip
    assert drain.update(figures) == pytest.approx(10 / (5 / 10))


def test_an_empty_queue_is_drained_and_a_stuck_one_is_not_known() -> None:
    drain = DrainEstimate()
    assert drain.update(reading(0.0, waiting=0, ended=5)) == 0.0
    assert drain.update(reading(10.0, waiting=9, ended=5)) is None, "nothing ends"


def test_only_the_last_minutes_count() -> None:
    drain = DrainEstimate(window_s=60.0)
    drain.update(reading(0.0, waiting=1000, ended=0))
    drain.update(reading(1000.0, waiting=1000, ended=10_000))
    drain.update(reading(1030.0, waiting=1000, ended=10_030))
    assert drain.update(reading(1060.0, waiting=1000, ended=10_060)) == pytest.approx(1000.0)


def test_sparse_readings_still_give_an_estimate() -> None:
    drain = DrainEstimate(window_s=60.0)
    drain.update(reading(0.0, waiting=10, ended=0))
    assert drain.update(reading(600.0, waiting=10, ended=600)) == pytest.approx(10.0)


def test_another_server_starts_the_estimate_anew() -> None:
    drain = DrainEstimate()
    drain.update(reading(0.0, waiting=10, ended=1000))
    assert drain.update(reading(10.0, waiting=10, ended=2)) is None
    assert drain.update(reading(20.0, waiting=10, ended=12)) == pytest.approx(10.0)
