"""The metrics of rollouts, by model and side; absent without one.

Every process that can see the queue exports them, as queue.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagemill.monitoring.metrics.metric import Labels, Metric, Number, counter, gauge
from pagemill.monitoring.queue_figures import ROLLOUT_STATES, QueueFigures, SideFigures


def _by_side(read: Callable[[SideFigures], Number]) -> Callable[[QueueFigures], Mapping[Labels, Number]]:
    return lambda figures: {
        (figures.queue, rollout.model, name): read(side)
        for rollout in figures.rollouts
        for name, side in rollout.sides.items()
    }


def _run_seconds(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {
        (figures.queue, rollout.model, name, quantile): seconds
        for rollout in figures.rollouts
        for name, side in rollout.sides.items()
        for quantile, seconds in side.run_seconds.items()
    }


def _share(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {(figures.queue, rollout.model): rollout.share for rollout in figures.rollouts}


def _state(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {
        (figures.queue, rollout.model, state): int(rollout.state == state)
        for rollout in figures.rollouts
        for state in ROLLOUT_STATES
    }


def _failing(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {(figures.queue, rollout.model): int(rollout.is_failing) for rollout in figures.rollouts}


def _agreement(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {
        (figures.queue, rollout.model): rollout.agreement
        for rollout in figures.rollouts
        if rollout.agreement is not None
    }


ROLLOUTS: tuple[Metric[QueueFigures], ...] = (
    counter(
        "queue_rollout_executions_total",
        "Executions of a rollout's sides that ended in success, in an error or with their worker.",
        _by_side(lambda side: side.executions),
        "queue",
        "model",
        "side",
    ),
    counter(
        "queue_rollout_failures_total",
        "Those that ended in an error, a retry or with their worker's crash.",
        _by_side(lambda side: side.failures),
        "queue",
        "model",
        "side",
    ),
    gauge(
        "queue_rollout_run_seconds",
        "Quantiles of the time from pull to commit, of the latest 256 executions of a side that succeeded.",
        _run_seconds,
        "queue",
        "model",
        "side",
        "quantile",
    ),
    gauge(
        "queue_rollout_workers",
        "Live workers of a side.",
        _by_side(lambda side: side.workers),
        "queue",
        "model",
        "side",
    ),
    gauge(
        "queue_rollout_share_ratio", "The share of the jobs that are the canary's.", _share, "queue", "model"
    ),
    gauge(
        "queue_rollout_state", "1 for the state that the rollout is in.", _state, "queue", "model", "state"
    ),
    gauge(
        "queue_rollout_failing",
        "1 while the rollout is halted because the canary failed more often than the stable side.",
        _failing,
        "queue",
        "model",
    ),
    gauge(
        "queue_rollout_agreement_ratio",
        "Of the jobs that were compared last, those with equal outputs on both sides; absent before.",
        _agreement,
        "queue",
        "model",
    ),
)
