"""The metrics of the queue and its server.

Every process that can see the queue exports them: a worker, and `pagemill exporter` where there is none. So a
query takes `max by (queue, model, priority)` first, and sums afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagemill.monitoring.metrics.metric import Labels, Metric, Number, counter, gauge
from pagemill.monitoring.queue_figures import ENDED, PRIORITIES, STAGES, Lane, QueueFigures, ServerFigures

OTHER_MODELS = "other"


def _by_lane(
    figures: QueueFigures, values: Mapping[Lane, float], combine: Callable[[float, float], float]
) -> Mapping[Labels, Number]:
    """Return a sample per model and priority, 0 if no job waits; models past the limit share one."""
    models = figures.models
    samples: dict[Labels, Number] = {
        (figures.queue, model, priority): 0 for model in models for priority in PRIORITIES
    }
    for (model, priority), value in values.items():
        labels = (figures.queue, model if model in models else OTHER_MODELS, priority)
        samples[labels] = combine(samples.get(labels, 0), value)
    return samples


def _waiting(figures: QueueFigures) -> Mapping[Labels, Number]:
    return _by_lane(figures, figures.waiting, lambda a, b: a + b)


def _oldest(figures: QueueFigures) -> Mapping[Labels, Number]:
    return _by_lane(figures, figures.oldest_age_seconds, max)


def _by_state(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {
        (figures.queue, "waiting"): sum(figures.waiting.values()),
        (figures.queue, "delayed"): figures.delayed,
        (figures.queue, "running"): figures.running,
        (figures.queue, "dead"): figures.dead,
    }


def _ended(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {(figures.queue, outcome): figures.ended.get(outcome, 0) for outcome in ENDED}


def _workers(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {(figures.queue, stage): figures.workers.get(stage, 0) for stage in STAGES}


def _serving(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {(figures.queue, model): figures.serving.get(model, 0) for model in figures.models}


def _drain(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {} if figures.drain_seconds is None else {(figures.queue,): figures.drain_seconds}


def _memory_kinds(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {(figures.queue, kind): value for kind, value in figures.memory.kinds.items()}


def _server(
    read: Callable[[ServerFigures], float | None],
) -> Callable[[QueueFigures], Mapping[Labels, Number]]:
    """Return a reader of one figure of the server, which gives no sample if it is unknown."""

    def sample(figures: QueueFigures) -> Mapping[Labels, Number]:
        value = read(figures.server) if figures.server is not None else None
        return {} if value is None else {(figures.queue,): value}

    return sample


JOBS_AND_WORKERS: tuple[Metric[QueueFigures], ...] = (
    gauge(
        "queue_waiting_jobs",
        "Jobs ready to be pulled, by model and priority.",
        _waiting,
        "queue",
        "model",
        "priority",
    ),
    gauge(
        "queue_oldest_job_age_seconds",
        "Age of the longest waiting job since its submit, by model and priority; 0 when none waits.",
        _oldest,
        "queue",
        "model",
        "priority",
    ),
    gauge(
        "queue_jobs",
        "Jobs in the queue by state. delayed: retries included; dead: until purged.",
        _by_state,
        "queue",
        "state",
    ),
    counter(
        "queue_submitted_jobs_total",
        "Jobs that the queue has taken.",
        lambda q: {q.queue: q.submitted},
        "queue",
    ),
    counter("queue_ended_jobs_total", "Jobs of all workers by how they ended.", _ended, "queue", "outcome"),
    gauge(
        "queue_estimated_drain_seconds",
        "Time that the jobs in the queue take at the rate of the last minutes; absent while nothing ends.",
        _drain,
        "queue",
    ),
    gauge(
        "queue_leases",
        "Leases of all workers, lapsed ones that nobody has swept included.",
        lambda q: {q.queue: q.leases},
        "queue",
    ),
    gauge("queue_paused", "1 while nobody may pull from the queue.", lambda q: {q.queue: q.paused}, "queue"),
    gauge("queue_workers", "Live workers by what they say they do.", _workers, "queue", "state"),
    gauge("queue_serving_workers", "Ready workers by the model they serve.", _serving, "queue", "model"),
    gauge(
        "queue_scrape_timestamp_seconds",
        "When the queue's figures were read.",
        lambda q: {q.queue: q.taken_at},
        "queue",
    ),
)

SERVER: tuple[Metric[QueueFigures], ...] = (
    gauge(
        "redis_memory_used_bytes",
        "Memory that the server uses.",
        _server(lambda s: s.memory_used_bytes),
        "queue",
    ),
    gauge(
        "redis_memory_max_bytes",
        "The server's maxmemory; 0 without a limit.",
        _server(lambda s: s.memory_max_bytes),
        "queue",
    ),
    gauge(
        "queue_memory_limit_bytes",
        "The server's memory up to which the queue takes jobs; the rest is for running ones. 0 without a limit.",
        lambda q: {q.queue: q.memory.limit_bytes},
        "queue",
    ),
    gauge(
        "queue_memory_bytes",
        "What holds the server's memory, estimated from 512 of its keys. records: of jobs and batches; other: not "
        "this queue's.",
        _memory_kinds,
        "queue",
        "kind",
    ),
    counter(
        "queue_memory_refused_total",
        "Jobs and files refused for want of memory; what is sent again is counted again.",
        lambda q: {q.queue: q.memory.refused},
        "queue",
    ),
    counter(
        "queue_memory_expired_results_total",
        "Large results that were removed early, to make room.",
        lambda q: {q.queue: q.memory.expired},
        "queue",
    ),
    counter(
        "redis_evicted_keys_total",
        "Keys that the server deleted for lack of memory. Anything above 0 means lost jobs.",
        _server(lambda s: s.evicted_keys),
        "queue",
    ),
    gauge(
        "redis_aof_enabled",
        "1 while the server keeps an append-only file.",
        _server(lambda s: s.aof_enabled),
        "queue",
    ),
    counter(
        "redis_aof_delayed_fsync_total",
        "Writes that waited for the disk.",
        _server(lambda s: s.aof_delayed_fsyncs),
        "queue",
    ),
    gauge(
        "redis_connected_clients",
        "Connections to the server.",
        _server(lambda s: s.connected_clients),
        "queue",
    ),
    gauge(
        "redis_blocked_clients",
        "Connections that wait for a doorbell or a list.",
        _server(lambda s: s.blocked_clients),
        "queue",
    ),
    gauge(
        "redis_connected_replicas",
        "Replicas of the server.",
        _server(lambda s: s.connected_replicas),
        "queue",
    ),
)

QUEUE_METRICS = JOBS_AND_WORKERS + SERVER
