"""Faults injected into a running worker and its server, each with the alerts that it must raise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagemill.engine.sampling_params import SamplingParams
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.schema import keys
from pagemill.worker.engine_host.loop import STATS_INTERVAL_S
from pagemill.worker.engine_host.messages import AddRequest
from pagemill.worker.worker import Worker
from tests.integration.worker.test_faults import fail_in_the_engine
from tests.worker.harness import PATIENCE_S, QueueClient, eventually

Seen = Callable[[], bool]
"""Returns True once Prometheus has raised all alerts of the fault."""

Fault = Callable[[QueueClient, Worker, Seen], None]


def overfill(client: QueueClient, worker: Worker, is_seen: Seen) -> None:
    """More requests than admission would accept, growing past the pool together, until the fault is detected."""

    def has_fallen() -> bool:
        stats = worker.engine.stats
        return stats is not None and stats.scheduler.waiting < 100

    floods = 0
    give_up = time.monotonic() + PATIENCE_S
    # A full pool is found by scrapes: its required duration depends on the machine and on Prometheus.
    while not is_seen():
        floods += 1
        assert time.monotonic() < give_up, "nobody learns that the pool is short"
        # Short prompts and long outputs: all are admitted, and each victim frees little, so the pool stays full.
        for i in range(400):
            prompt = [32 + (i * 7 + j * floods) % 90 for j in range(16)]
            params = SamplingParams(max_tokens=120, ignore_eos=True)
            worker.engine.add(
                AddRequest(request_id=f"flood-{floods}-{i}", prompt_token_ids=prompt, params=params)
            )
        # The next flood comes before the pool has space again.
        time.sleep(3 * STATS_INTERVAL_S)  # until the snapshot includes this one
        eventually(has_fallen, "the flood to fall")
    eventually(lambda: not worker.engine.engine.has_unfinished(), "the floods' end")


def submit_rubbish(client: QueueClient, worker: Worker, is_seen: Seen) -> None:
    ended = client.stats().counts["succeeded"]
    for _ in range(ended // 5 + 10):
        client.submit_raw(b"no json")


def fail_steps(client: QueueClient, worker: Worker, is_seen: Seen) -> None:
    """Jobs fail with engine errors, and steps raise."""
    executor = worker.engine.engine._parts.executor
    launch = executor.launch
    raised = threading.Event()

    def failing(plan: Any) -> Any:
        if not raised.is_set():
            raised.set()
            raise RuntimeError("the device is gone for a moment")
        return launch(plan)

    executor.launch = failing  # type: ignore[method-assign]
    client.wait(client.submit({"prompt": "a", "max_tokens": 3}))
    assert raised.is_set()
    # As many as needed for a fifth of the pulled jobs; one of each round must not be retried.
    received = sum(worker.counters.jobs_received.read().values())
    while sum(worker.counters.job_retries.read().values()) < 0.22 * received:
        job = {"prompt": "0123456789", "max_tokens": 300, "ignore_eos": True}
        for job_id in client.submit(job | {"max_attempts": 1}, *[job] * 15):
            eventually(
                lambda job_id=job_id: worker.table.by_job(job_id) or client.status(job_id).done,
                "the job's start",
            )
            if worker.table.by_job(job_id) is not None:
                fail_in_the_engine(worker, job_id, "engine_error")
        received = sum(worker.counters.jobs_received.read().values())


def steal_jobs(client: QueueClient, worker: Worker, is_seen: Seen) -> None:
    """Another worker takes over running jobs, as if the leases had expired: the worker detects it when it
    renews or when it commits."""
    counters = worker.counters
    prompt = "0123456789" * 15

    def steal() -> bool:
        # Of several lengths: the next checkpoint detects the loss, unless a job ends before it.
        job_ids = client.submit(*({"prompt": prompt, "max_tokens": 8 * n} for n in range(16, 0, -1)))
        eventually(lambda: client.generated(job_ids[0]) or client.status(job_ids[0]).done, "a checkpoint")
        client.redis.zadd(keys.prefix(client.queue) + "leases", dict.fromkeys(job_ids, 1), xx=True)
        reply = client.run(transitions.pull(client.queue, "thief", ["echo"], 16, 10_000))
        # A released job is pulled by the worker again, which then drops its first execution without a commit.
        eventually(lambda: len(worker.table) == 0, "the end of the first executions")
        for job in reply.jobs:
            client.run(transitions.release(client.queue, job.job_id, job.token))
        client.wait(job_ids)
        return counters.commits.read()["fenced"] > 0 and counters.leases_lost.read() > 0

    eventually(steal, "a lost lease and a fenced commit")


def stop_the_world(client: QueueClient, worker: Worker, is_seen: Seen) -> None:
    """A snapshot like that of a hung engine with inconsistent accounts; idle engines do not publish a new one."""
    eventually(lambda: len(worker.table) == 0, "an idle engine")
    time.sleep(3 * STATS_INTERVAL_S)
    stats = worker.engine.stats
    assert stats is not None
    worker.engine._stats = replace(
        stats,
        kv=replace(stats.kv, free_blocks=stats.kv.free_blocks + 1),
        scheduler=replace(stats.scheduler, running=3),
        steps=replace(stats.steps, last_time=stats.steps.last_time - 100),
    )


def starve_the_server(client: QueueClient, worker: Worker, is_seen: Seen) -> None:
    used = client.redis.info("memory")["used_memory"]
    client.redis.config_set("appendonly", "no")
    for i in range(2000):
        client.redis.set(f"junk-{i}", "x" * 500, ex=60)
    client.redis.config_set("maxmemory-policy", "volatile-ttl")
    client.redis.config_set("maxmemory", int(used * 1.05))
    client.redis.set("one more", "x" * 1000)


def pause_with_jobs_waiting(client: QueueClient, worker: Worker, is_seen: Seen) -> None:
    client.pause()
    client.submit({"prompt": "later"}, {"prompt": "never", "model": "nobody-serves-it"})


FAULTS: list[tuple[Fault, set[str]]] = [
    (overfill, {"PagemillKvCacheSaturated", "PagemillKvCacheAllocationFailures", "PagemillPreemptionThrash"}),
    (submit_rubbish, {"PagemillJobErrorRateHigh"}),
    (fail_steps, {"PagemillEngineStepsFailing", "PagemillDeadLettersGrowing", "PagemillRetryStorm"}),
    (steal_jobs, {"PagemillLeasesLost", "PagemillFencedCommits", "PagemillRedeliveryRateHigh"}),
    (stop_the_world, {"PagemillEngineStalled", "PagemillKvCacheAccountingBroken"}),
    (pause_with_jobs_waiting, {"PagemillQueuePaused", "PagemillWorkerDown"}),
    (starve_the_server, {"PagemillRedisMemoryHigh", "PagemillRedisEvictedKeys", "PagemillRedisAofOff"}),
]
"""In this order: each fault finds the worker in the state after the one before. A fault may raise other alerts too."""
