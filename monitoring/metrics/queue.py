"""The metrics of the queue, its server and its rollouts.

Every process with access to the queue exports them: workers, and `pagemill exporter` where there are none. So a
query applies `max by (queue, model, priority)` first, and sums afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

from pagemill.monitoring.metrics.metric import Figure, Labels, Metric, Number, counter, each, gauge, labeled
from pagemill.monitoring.queue_figures import (
    ENDED,
    PRIORITIES,
    ROLLOUT_STATES,
    STAGES,
    TOKEN_KINDS,
    Lane,
    QueueFigures,
    ServerFigures,
    SideFigures,
    UsageFigures,
)

OTHER_MODELS = "other"
Read = Callable[[QueueFigures], Figure]
"""Readers omit the label `queue`, with which every metric here starts."""


def _gauge(name: str, help: str, read: Read, *labels: str) -> Metric[QueueFigures]:
    return gauge(name, help, lambda figures: labeled((figures.queue,), read(figures)), "queue", *labels)


def _counter(name: str, help: str, read: Read, *labels: str) -> Metric[QueueFigures]:
    return counter(name, help, lambda figures: labeled((figures.queue,), read(figures)), "queue", *labels)


def _by_lane(
    figures: QueueFigures, values: Mapping[Lane, float], combine: Callable[[float, float], float]
) -> Mapping[Labels, Number]:
    """Return a sample per model and priority, 0 if no job waits; models past the limit share one."""
    models = figures.models
    samples: dict[Labels, Number] = {(model, priority): 0 for model in models for priority in PRIORITIES}
    for (model, priority), value in values.items():
        labels = (model if model in models else OTHER_MODELS, priority)
        samples[labels] = combine(samples.get(labels, 0), value)
    return samples


def _by_model(figures: QueueFigures) -> Mapping[str, Number]:
    """Return the ready workers of each model; those of the models past the limit as a lower bound."""
    others = [count for model, count in figures.serving.items() if model not in figures.models]
    return each(figures.serving, figures.models) | ({OTHER_MODELS: max(others)} if others else {})


def _by_state(figures: QueueFigures) -> Mapping[str, Number]:
    waiting = sum(figures.waiting.values())
    return {"waiting": waiting, "delayed": figures.delayed, "running": figures.running, "dead": figures.dead}


def _usage(read: Callable[[UsageFigures], Figure]) -> Read:
    return lambda figures: None if figures.usage is None else read(figures.usage)


def _server(read: Callable[[ServerFigures], float | None]) -> Read:
    return lambda figures: None if figures.server is None else read(figures.server)


def _by_side(read: Callable[[SideFigures], Number]) -> Callable[[QueueFigures], Mapping[Labels, Number]]:
    return lambda figures: {
        (rollout.model, name): read(side)
        for rollout in figures.rollouts
        for name, side in rollout.sides.items()
    }


def _run_seconds(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {
        (rollout.model, name, quantile): seconds
        for rollout in figures.rollouts
        for name, side in rollout.sides.items()
        for quantile, seconds in side.run_seconds.items()
    }


def _rollout_state(figures: QueueFigures) -> Mapping[Labels, Number]:
    return {
        (rollout.model, state): int(rollout.state == state)
        for rollout in figures.rollouts
        for state in ROLLOUT_STATES
    }


JOBS_AND_WORKERS: tuple[Metric[QueueFigures], ...] = (
    _gauge("queue_waiting_jobs", "Number of jobs ready to be pulled.",
        lambda q: _by_lane(q, q.waiting, operator.add), "model", "priority"),
    _gauge("queue_oldest_job_age_seconds",
        "Age of the oldest waiting job, in seconds; 0 if none waits.",
        lambda q: _by_lane(q, q.oldest_age_seconds, max), "model", "priority"),
    _gauge("queue_jobs", "Number of jobs in the queue by state. delayed: retries included; dead: until purged.",
        _by_state, "state"),
    _counter("queue_submitted_jobs_total", "Number of jobs submitted.", lambda q: q.submitted),
    _counter("queue_ended_jobs_total", "Number of jobs that ended, by outcome, over all workers.",
        lambda q: each(q.ended, ENDED), "outcome"),
    _gauge("queue_tokens_today",
        "Number of tokens of jobs that ended since 0:00 UTC; cached: included in prompt.",
        _usage(lambda u: each(u.tokens, TOKEN_KINDS)), "kind"),
    _gauge("queue_device_seconds_today", "Device time of jobs that ended since 0:00 UTC, in seconds.",
        _usage(lambda u: u.device_seconds)),
    _gauge("queue_tenants_over_quota", "Number of tenants whose jobs wait for a quota.",
        _usage(lambda u: u.tenants_over_quota)),
    _gauge("queue_estimated_drain_seconds",
        "Time to finish all jobs at the current rate, in seconds; absent while no job ends.",
        lambda q: q.drain_seconds),
    _gauge("queue_leases", "Number of leases of all workers, including lapsed ones until the next sweep.",
        lambda q: q.leases),
    _gauge("queue_paused", "Whether the queue is paused (1) or not (0).", lambda q: q.paused),
    _gauge("queue_workers", "Number of live workers by reported state.",
        lambda q: each(q.workers, STAGES), "state"),
    _gauge("queue_serving_workers", "Number of ready workers by the model they serve.",
        _by_model, "model"),
    _gauge("queue_scrape_timestamp_seconds", "Unix time at which the queue was read, in seconds.",
        lambda q: q.taken_at),
)  # fmt: skip

SERVER: tuple[Metric[QueueFigures], ...] = (
    _gauge("redis_memory_used_bytes", "Memory that the server uses, in bytes.",
        _server(lambda s: s.memory_used_bytes)),
    _gauge("redis_memory_max_bytes", "Memory limit of the server (maxmemory), in bytes; 0 without a limit.",
        _server(lambda s: s.memory_max_bytes)),
    _gauge("queue_memory_limit_bytes",
        "Memory of the server up to which the queue accepts jobs, in bytes; 0 without a limit.",
        lambda q: q.memory.limit_bytes),
    _gauge("queue_memory_bytes",
        "Memory of the server by kind of data, in bytes, estimated from 512 keys; other: not this"
        " queue's.",
        lambda q: q.memory.kinds, "kind"),
    _counter("queue_memory_rejections_total",
        "Number of jobs and files rejected because of the memory limit.",
        lambda q: q.memory.refused),
    _counter("redis_evicted_keys_total",
        "Number of keys that the server evicted. Above 0, jobs may be lost.",
        _server(lambda s: s.evicted_keys)),
    _gauge("redis_aof_enabled", "Whether the server has an append-only file (1) or not (0).",
        _server(lambda s: s.aof_enabled)),
    _counter("redis_aof_delayed_fsync_total", "Number of writes that waited for the disk.",
        _server(lambda s: s.aof_delayed_fsyncs)),
    _gauge("redis_connected_clients", "Number of connections to the server.",
        _server(lambda s: s.connected_clients)),
    _gauge("redis_blocked_clients", "Number of connections that block on a list.",
        _server(lambda s: s.blocked_clients)),
    _gauge("redis_connected_replicas", "Number of replicas of the server.", _server(lambda s: s.connected_replicas)),
)  # fmt: skip

ROLLOUTS: tuple[Metric[QueueFigures], ...] = (
    _counter("queue_rollout_executions_total",
        "Number of executions that ended, by side.",
        _by_side(lambda side: side.executions), "model", "side"),
    _counter("queue_rollout_failures_total",
        "Number of executions that failed or crashed, by side.",
        _by_side(lambda side: side.failures), "model", "side"),
    _gauge("queue_rollout_run_seconds",
        "Quantiles of the time from pull to commit, in seconds, of the latest 256 successes.",
        _run_seconds, "model", "side", "quantile"),
    _gauge("queue_rollout_workers", "Number of live workers of a side.",
        _by_side(lambda side: side.workers), "model",
        "side"),
    _gauge("queue_rollout_share_ratio", "Fraction of the jobs that the canary gets, 0 to 1.",
        lambda q: {rollout.model: rollout.share for rollout in q.rollouts}, "model"),
    _gauge("queue_rollout_state", "Whether the rollout is in this state (1) or not (0).", _rollout_state, "model",
        "state"),
    _gauge("queue_rollout_failing",
        "Whether the rollout is halted because of the canary's failures (1) or not (0).",
        lambda q: {rollout.model: int(rollout.is_failing) for rollout in q.rollouts}, "model"),
    _gauge("queue_rollout_agreement_ratio",
        "Fraction of compared jobs with equal outputs, 0 to 1; absent before a comparison.",
        lambda q: {r.model: r.agreement for r in q.rollouts if r.agreement is not None}, "model"),
)  # fmt: skip

QUEUE_METRICS = JOBS_AND_WORKERS + SERVER + ROLLOUTS
