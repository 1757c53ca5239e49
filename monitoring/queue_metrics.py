"""The queue's metrics. Several processes may export the same queue: take `max by (queue, priority)`."""

from __future__ import annotations

from collections.abc import Mapping

from monitoring.metrics import Labels, Metric, Number, gauge
from monitoring.queue_figures import PRIORITIES, QueueFigures


def _waiting(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {(figures.queue, priority): figures.waiting.get(priority, 0) for priority in PRIORITIES}


def _oldest(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {
        (figures.queue, priority): figures.oldest_age_seconds.get(priority, 0.0) for priority in PRIORITIES
    }


def _by_state(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {
        (figures.queue, "waiting"): sum(figures.waiting.values()),
        (figures.queue, "delayed"): figures.delayed,
        (figures.queue, "running"): figures.running,
        (figures.queue, "dead"): figures.dead,
    }


QUEUE_METRICS: tuple[Metric[QueueFigures], ...] = (
    gauge("queue_waiting_jobs", "Jobs ready to be pulled, by priority.", _waiting, "queue", "priority"),
    gauge(
        "queue_oldest_job_age_seconds",
        "Age of the longest waiting job since its submit, by priority; 0 when none waits.",
        _oldest,
        "queue",
        "priority",
    ),
    gauge("queue_jobs", "Jobs in the queue by state.", _by_state, "queue", "state"),
    gauge(
        "queue_leases",
        "Leases of all workers, lapsed ones that nobody has swept included.",
        lambda q: {q.queue: q.leases},
        "queue",
    ),
    gauge("queue_paused", "1 while nobody may pull from the queue.", lambda q: {q.queue: q.paused}, "queue"),
    gauge(
        "queue_scrape_timestamp_seconds",
        "When the queue's figures were read.",
        lambda q: {q.queue: q.taken_at},
        "queue",
    ),
)
