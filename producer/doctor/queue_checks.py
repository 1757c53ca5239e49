"""Checks of the queue: whether its waiting jobs are served."""

from __future__ import annotations

from collections import Counter, defaultdict

from pagemill.producer.doctor.finding import Finding
from pagemill.producer.wire.calls.registry import QueueStats, WorkerInfo
from pagemill.producer.wire.schema import keys

LONG_WAIT_S = 300.0


def queue_findings(queue: str, stats: QueueStats, workers: list[WorkerInfo]) -> list[Finding]:
    return [_paused(queue, stats), _workers(queue, workers), _unserved(queue, stats, workers),
            _revisions(stats, workers), _features(stats, workers), _oldest(stats), _dead(queue, stats)]  # fmt: skip


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
    message = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    wrong = [worker.id for worker in workers if worker.state == "quarantined"]
    if wrong:
        return Finding(
            "workers", "error", f"{message}; quarantined: {', '.join(wrong)}",
            f"it computes wrong results: check its device; pagemill recall list --queue {queue}",
        )  # fmt: skip
    unhealthy = [worker.id for worker in workers if worker.state == "unhealthy"]
    if unhealthy:
        return Finding(
            "workers", "error", f"{message}; unhealthy: {', '.join(unhealthy)}",
            "its engine does not make progress: see its log; its supervisor should restart it",
        )  # fmt: skip
    return Finding("workers", "ok", message)


def _unserved(queue: str, stats: QueueStats, workers: list[WorkerInfo]) -> Finding:
    served = {lane for worker in workers for lane in worker.served()}
    waiting: Counter[str] = Counter()
    for (_, _, model), jobs in stats.waiting.items():
        if model not in served:
            waiting[model] += jobs
    waiting = +waiting
    if waiting and not any(worker.state == "loading" for worker in workers):
        return Finding(
            "models", "warning", f"jobs wait for models that no live worker serves: {_most(waiting)}",
            "start a worker for them, or cancel them; is the name right?",
        )  # fmt: skip
    return Finding("models", "ok", f"served: {', '.join(sorted(served)) or 'none'}")


def _revisions(stats: QueueStats, workers: list[WorkerInfo]) -> Finding:
    served = {lane for worker in workers for lane in worker.lanes()}
    pinned = Counter[str]()
    for lane, jobs in stats.lanes.items():
        if keys.pinned_revision(lane) is not None:
            pinned[keys.served_name(lane)] += jobs
    waiting = Counter(
        {name.replace("~", " at "): jobs for name, jobs in pinned.items() if name not in served}
    )
    if waiting and not any(worker.state == "loading" for worker in workers):
        return Finding(
            "revisions", "warning", f"jobs wait for revisions that no live worker announces: {_most(waiting)}",
            "start a worker of the revision, or cancel them; `pagemill workers` has those there are",
        )  # fmt: skip
    return Finding(
        "revisions", "ok", "every job that names one has a worker" if pinned else "no job waits for one"
    )


def _features(stats: QueueStats, workers: list[WorkerInfo]) -> Finding:
    waiting, known_by_name = Counter[str](), defaultdict[str, list[set[str]]](list)
    for worker in workers:
        for name in worker.lanes():
            known_by_name[name].append(set(worker.knows.split("+")))
    for lane, jobs in stats.lanes.items():
        name, words = keys.served_name(lane), keys.needed_words(lane)
        known = known_by_name.get(name)
        if words and known and not any(known_words.issuperset(words) for known_words in known):
            waiting[f"{name} needs {', '.join(words)}"] += jobs
    if waiting:
        return Finding(
            "features", "warning", f"jobs wait for what no live worker of their model knows: {_most(waiting)}",
            "upgrade a worker of the model, or start one with a store for `store`",
        )  # fmt: skip
    return Finding("features", "ok", "live workers know what the jobs need")


def _most(waiting: Counter[str]) -> str:
    return ", ".join(f"{name} ({jobs})" for name, jobs in waiting.most_common(5))


def _oldest(stats: QueueStats) -> Finding:
    oldest = max(stats.oldest_s.values(), default=0.0)
    if oldest > LONG_WAIT_S:
        return Finding(
            "oldest job", "warning", f"it has waited for {oldest / 60:.0f} minutes",
            "the metric admission_blocked_seconds_total shows why workers don't pull; more workers",
        )  # fmt: skip
    return Finding("oldest job", "ok", f"it has waited for {oldest:.1f} s" if oldest else "nothing waits")


def _dead(queue: str, stats: QueueStats) -> Finding:
    if stats.dead:
        jobs = "1 job is" if stats.dead == 1 else f"{stats.dead} jobs are"
        return Finding("dead letters", "warning", f"{jobs} dead", f"pagemill dead list --queue {queue}")
    return Finding("dead letters", "ok", "none")
