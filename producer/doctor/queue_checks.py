"""Checks of the queue: are the jobs that wait in it being served?"""

from __future__ import annotations

from collections import Counter

from pagemill.producer.doctor.finding import Finding
from pagemill.producer.wire.calls.registry import QueueStats, WorkerInfo

LONG_WAIT_S = 300.0


def queue_findings(queue: str, stats: QueueStats, workers: list[WorkerInfo]) -> list[Finding]:
    return [_paused(queue, stats), _workers(queue, workers), _unserved(queue, stats, workers),
            _revisions(stats, workers), _oldest(stats), _dead(queue, stats)]  # fmt: skip


def _paused(queue: str, stats: QueueStats) -> Finding:
    if stats.paused:
        return Finding(
            "queue",
            "warning",
            f"{queue} is paused: no job is handed out",
            f"pagemill queue resume --queue {queue}",
        )
    counts = ", ".join(f"{stats.counts.get(state, 0)} {state}" for state in ("queued", "delayed", "running"))
    return Finding("queue", "ok", f"{queue}: {counts}")


def _workers(queue: str, workers: list[WorkerInfo]) -> Finding:
    if not workers:
        return Finding(
            "workers", "warning", f"no worker is alive on queue {queue}",
            f"pagemill worker --model smollm2 --queue {queue}",
        )  # fmt: skip
    states = Counter(worker.state for worker in workers)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    unwell = [worker.id for worker in workers if worker.state == "unwell"]
    if unwell:
        return Finding(
            "workers", "error", f"{told}; unwell: {', '.join(unwell)}",
            "its engine gets nowhere: see its log; its supervisor should restart it",
        )  # fmt: skip
    return Finding("workers", "ok", told)


def _unserved(queue: str, stats: QueueStats, workers: list[WorkerInfo]) -> Finding:
    served = {lane for worker in workers for lane in worker.served()}
    waiting: Counter[str] = Counter()
    for (_, _, model), jobs in stats.waiting.items():
        if model not in served:
            waiting[model] += jobs
    waiting = +waiting
    if waiting and not any(worker.state == "loading" for worker in workers):
        told = ", ".join(f"{model} ({jobs})" for model, jobs in waiting.most_common(5))
        return Finding(
            "models", "warning", f"jobs wait for models that no live worker serves: {told}",
            "start a worker for them, or cancel them; is the name right?",
        )  # fmt: skip
    return Finding("models", "ok", f"served: {', '.join(sorted(served)) or 'none'}")


def _revisions(stats: QueueStats, workers: list[WorkerInfo]) -> Finding:
    served = {lane for worker in workers for lane in worker.lanes()}
    waiting = Counter({name: jobs for name, jobs in stats.pinned.items() if name not in served})
    if waiting and not any(worker.state == "loading" for worker in workers):
        told = ", ".join(f"{name.replace('~', ' at ')} ({jobs})" for name, jobs in waiting.most_common(5))
        return Finding(
            "revisions", "warning", f"jobs wait for revisions that no live worker announces: {told}",
            "start a worker of the revision, or cancel them; `pagemill workers` has those there are",
        )  # fmt: skip
    return Finding(
        "revisions", "ok", "every job that names one has a worker" if stats.pinned else "no job waits for one"
    )


def _oldest(stats: QueueStats) -> Finding:
    oldest = max(stats.oldest_s.values(), default=0.0)
    if oldest > LONG_WAIT_S:
        return Finding(
            "oldest job", "warning", f"it has waited for {oldest / 60:.0f} minutes",
            "the metric admission_blocked_seconds_total says why workers don't pull; more workers",
        )  # fmt: skip
    return Finding("oldest job", "ok", f"it has waited for {oldest:.1f} s" if oldest else "nothing waits")


def _dead(queue: str, stats: QueueStats) -> Finding:
    if stats.dead:
        jobs = "1 job is" if stats.dead == 1 else f"{stats.dead} jobs are"
        return Finding("dead letters", "warning", f"{jobs} dead", f"pagemill dead list --queue {queue}")
    return Finding("dead letters", "ok", "none")
