"""Reads a queue, its workers and its server for a scrape."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

from pagemill.monitoring.live.feed import OtherWorker, PageLinks
from pagemill.monitoring.queue_figures import (
    ENDED,
    STAGES,
    DrainEstimate,
    Ended,
    Lane,
    MemoryFigures,
    Priority,
    QueueFigures,
    RolloutFigures,
    ServerFigures,
    SideFigures,
    UsageFigures,
    WorkerStage,
)
from pagemill.producer.wire.calls import job_lists, memory, registry, rollouts
from pagemill.producer.wire.calls.memory import MemoryUse
from pagemill.producer.wire.calls.metering import usage
from pagemill.producer.wire.calls.metering.usage import UsageTotals
from pagemill.producer.wire.calls.registry import QueueStats, WorkerInfo, page_address
from pagemill.producer.wire.calls.rollouts import RolloutStatus
from pagemill.producer.wire.schema.errors import AccessDenied, RedisRefused
from pagemill.worker.job_queue import JobQueue, ServerClock


class QueueReader:
    """Has a separate connection, so that scrapes and commits do not wait for each other."""

    def __init__(self, queue: JobQueue, clock: ServerClock) -> None:
        self._queue = queue
        self._clock = clock
        self._drain = DrainEstimate()

    def read(self) -> QueueFigures:
        """Return the current statistics. Raises RedisUnavailable."""
        name = self._queue.queue
        stats = registry.stats(self._queue.run, name)
        workers = self._queue.run(registry.workers(name))
        server = server_figures(self._queue.server_info())
        totals = self._queue.run(usage.totals(name))
        figures = replace(
            queue_figures(name, stats, workers, server, self._clock.now()),
            usage=usage_figures(totals),
            memory=self._memory(stats.memory, server),
            rollouts=rollout_figures(self._queue.run(rollouts.statuses(name))),
        )
        return figures.with_drain(self._drain.update(figures))

    def _memory(self, use: MemoryUse, server: ServerFigures) -> MemoryFigures:
        try:
            shares = memory.shares(self._queue.run, self._queue.queue)
        except (AccessDenied, RedisRefused):
            shares = {}
        used = server.memory_used_bytes or use.used
        return MemoryFigures(
            limit_bytes=int(use.share * use.most),
            refused=use.refused,
            kinds={kind: share * used for kind, share in shares.items()},
        )

    def surroundings(self) -> PageLinks:
        """Return links to the queue's live workers and to the jobs page. Raises RedisUnavailable."""
        name = self._queue.queue
        found = self._queue.run(registry.workers(name))
        workers = [
            OtherWorker(worker.id, worker.state, worker.models, worker.running, page_address(worker))
            for worker in sorted(found, key=lambda worker: worker.id)
        ]
        return PageLinks(workers, self._queue.run(job_lists.jobs_page(name)))


def queue_figures(
    queue: str, stats: QueueStats, workers: list[WorkerInfo], server: ServerFigures | None, now: float
) -> QueueFigures:
    """Convert a queue's statistics for monitoring, summed over tenants."""
    waiting: dict[Lane, int] = {}
    oldest: dict[Lane, float] = {}
    for (priority, _, model), jobs in stats.waiting.items():
        lane = (model, cast(Priority, priority))
        waiting[lane] = waiting.get(lane, 0) + jobs
    for (priority, _, model), age_s in stats.oldest_s.items():
        lane = (model, cast(Priority, priority))
        oldest[lane] = max(oldest.get(lane, 0.0), age_s)
    ended: dict[Ended, int] = {outcome: stats.counts.get(outcome, 0) for outcome in ENDED}
    states = Counter(worker.state for worker in workers)
    stages: dict[WorkerStage, int] = {stage: states[stage] for stage in STAGES}
    return QueueFigures(
        queue=queue,
        taken_at=now,
        waiting=waiting,
        oldest_age_seconds=oldest,
        delayed=stats.counts.get("delayed", 0),
        running=stats.counts.get("running", 0),
        leases=stats.leases,
        dead=stats.dead,
        paused=stats.paused,
        submitted=sum(stats.counts.values()),
        ended=ended,
        workers=stages,
        serving=Counter(model for worker in workers if worker.state == "ready" for model in worker.served()),
        server=server,
    )


def usage_figures(totals: UsageTotals) -> UsageFigures:
    return UsageFigures(
        tokens={
            "prompt": totals.prompt_tokens,
            "cached": totals.cached_tokens,
            "completion": totals.completion_tokens,
        },
        device_seconds=totals.device_s,
        tenants_over_quota=totals.tenants_over_quota,
    )


def rollout_figures(found: list[RolloutStatus]) -> tuple[RolloutFigures, ...]:
    """Convert rollouts for monitoring."""

    def side(figures: rollouts.SideFigures) -> SideFigures:
        runs = {"0.5": figures.run_p50_s, "0.9": figures.run_p90_s}
        return SideFigures(
            workers=figures.workers,
            executions=figures.jobs,
            failures=figures.failures,
            run_seconds={quantile: run for quantile, run in runs.items() if run is not None},
        )

    return tuple(
        RolloutFigures(
            model=one.model,
            state=one.state,
            share=one.share,
            agreement=one.agreed / one.compared if one.compared else None,
            sides={"stable": side(one.stable), "canary": side(one.canary)},
            is_failing=one.state == "halted" and one.halted_for is not None,
        )
        for one in found
    )


def server_figures(info: dict[str, Any]) -> ServerFigures:
    """Read the server's statistics from INFO; a field that a managed server hides is None."""

    def number(name: str) -> int | None:
        value = info.get(name)
        return int(value) if isinstance(value, int | float) else None

    aof = number("aof_enabled")
    return ServerFigures(
        memory_used_bytes=number("used_memory"),
        memory_max_bytes=number("maxmemory"),
        evicted_keys=number("evicted_keys"),
        aof_enabled=None if aof is None else bool(aof),
        aof_delayed_fsyncs=number("aof_delayed_fsync"),
        connected_clients=number("connected_clients"),
        blocked_clients=number("blocked_clients"),
        connected_replicas=number("connected_slaves"),
    )
