"""Devices fail under their workers: the jobs continue elsewhere, and only a job that kills every device is buried."""

from __future__ import annotations

import re
import time
from collections import Counter

import pytest

from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.reads import Outcome
from tests.chaos import invariants
from tests.chaos.conftest import Spawn
from tests.chaos.fork_server import ForkedWorker, ForkServer
from tests.worker.harness import QueueClient, eventually

pytestmark = pytest.mark.slow


TEXTS = [f"{i:03d} " * 25 for i in range(64)]


def submit(client: QueueClient, texts: list[str]) -> list[str]:
    jobs = ({"prompt": text, "max_tokens": len(text), "max_attempts": 1} for text in texts)
    return client.submit(*jobs, batch_id="all")


def check_nothing_counted(client: QueueClient, ids: list[str]) -> list[Outcome]:
    """All succeeded with the right output, at their first attempt, which is the only one."""
    outcomes = invariants.check(client, ids)
    invariants.check_echoes(outcomes, TEXTS)
    assert {client.status(job_id).attempt for job_id in ids} == {1}
    return outcomes


def keep_running(spawn: Spawn, client: QueueClient, ids: list[str], workers: int) -> list[ForkedWorker]:
    """A supervisor: restarts exited workers until all jobs have finished. Returns those that lost their device."""
    running = [spawn() for _ in range(workers)]
    started = list(running)
    while client.counts("all").ended < len(ids):
        for index, worker in enumerate(running):
            if not worker.is_alive:
                running[index] = spawn()
                started.append(running[index])
                assert len(started) <= 20
        time.sleep(0.02)
    return [worker for worker in started if "the device is lost" in worker.log()]


def requeued(worker: ForkedWorker) -> tuple[int, int]:
    """Count the jobs that a worker released: the unblamed ones, and those that may have killed its device."""
    log = worker.log()
    return len(re.findall("job requeued", log)), len(re.findall("may have killed the device", log))


def test_the_jobs_of_a_worker_whose_device_died_succeed_on_another(
    client: QueueClient, spawn: Spawn, fork_server: ForkServer
) -> None:
    ids = submit(client, TEXTS[:8])
    # 0.2 s per token: these jobs are half done when the next prompt, which kills the device, starts.
    first = spawn(model="echo:200")
    eventually(lambda: all(client.generated(job_id) for job_id in ids), "tokens on record")
    fork_server.kill_devices(1)
    ids += submit(client, TEXTS[8:])
    first.wait()
    assert "the engine died: DeviceLost('the device is lost: RuntimeError: CUDA error" in first.log()
    assert "Traceback" in first.log(), "where it happened"
    spawn()
    outcomes = check_nothing_counted(client, ids)
    assert any(o.result and o.result.resumed_tokens for o in outcomes), "nothing went on from its checkpoint"


def test_a_crash_is_counted_for_jobs_of_the_last_step_only(
    client: QueueClient, spawn: Spawn, fork_server: ForkServer
) -> None:
    fork_server.kill_devices(1)
    ids = submit(client, TEXTS)
    first = spawn(max_num_batched_tokens=150)  # a prompt and a half: the other jobs wait
    first.wait()
    blameless, suspects = requeued(first)
    assert 1 <= suspects <= 2
    assert blameless >= 10
    client.run(transitions.sweep(client.queue))
    assert client.counts("all").queued == len(ids), "nothing waits for a lease to lapse"
    assert Counter(client.status(job_id).crashes for job_id in ids) == {0: len(ids) - suspects, 1: suspects}
    spawn()
    check_nothing_counted(client, ids)


@pytest.mark.parametrize(("deaths", "workers"), [(4, 2), (2, 1)], ids=["one of two", "a lone one"])
def test_workers_that_are_started_again_lose_nothing(
    deaths: int, workers: int, client: QueueClient, spawn: Spawn, fork_server: ForkServer
) -> None:
    fork_server.kill_devices(deaths)
    ids = submit(client, TEXTS)
    ended = keep_running(spawn, client, ids, workers=workers)
    assert len(ended) == deaths
    check_nothing_counted(client, ids)


def test_a_job_that_kills_every_device_is_buried_and_the_others_lose_nothing(
    client: QueueClient, spawn: Spawn
) -> None:
    ids = submit(client, TEXTS[:32])
    poison = submit(client, ["\x09"])
    ids += submit(client, TEXTS[32:])
    ended = keep_running(spawn, client, [*ids, *poison], workers=2)
    assert len(ended) == 5
    outcomes = invariants.check(client, [*ids, *poison])
    invariants.check_echoes(outcomes[:-1], TEXTS)
    assert Counter(outcome.state for outcome in outcomes) == {"succeeded": 64, "dead": 1}
    assert outcomes[-1].error is not None
    assert outcomes[-1].error.code == "crash_suspect"
