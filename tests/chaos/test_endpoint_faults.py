"""The endpoint of two workers is killed, frozen and replaced in the middle of jobs, and the workers with it."""

from __future__ import annotations

import random
import signal
import time

import pytest

from pagemill.producer.wire.calls.reads import Outcome
from tests.chaos import invariants
from tests.chaos.conftest import Spawn
from tests.chaos.echo_endpoint import EchoEndpoint
from tests.chaos.fork_server import ForkedWorker, check_alive
from tests.chaos.test_worker_kills import prompts, running_and_ended, submit
from tests.worker.harness import QueueClient, eventually

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("engine", ["endpoint"], indirect=True)]


def check(
    client: QueueClient, ids: list[str], texts: list[str], workers: list[ForkedWorker]
) -> list[Outcome]:
    outcomes = invariants.check(client, ids)
    invariants.check_echoes(outcomes, texts)
    assert not any("Traceback" in worker.log() for worker in workers)
    return outcomes


def test_kill_9_of_the_endpoint(client: QueueClient, spawn: Spawn, endpoint: EchoEndpoint) -> None:
    """The workers keep running, and no job counts a crash or an attempt for it."""
    texts = prompts(60)
    ids = submit(client, texts)
    workers = [spawn(), spawn()]
    eventually(lambda: running_and_ended(client), "the middle of the run")
    endpoint.kill()
    eventually(lambda: client.counts("all").running == 0, "the jobs to be back")
    endpoint.start()
    outcomes = check(client, ids, texts, workers)
    assert any(outcome.result and outcome.result.resumed_tokens for outcome in outcomes)
    statuses = [client.status(job_id) for job_id in ids]
    assert {status.attempt for status in statuses} == {1}
    check_alive(workers)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_endpoint_and_workers_die_at_random(
    seed: int, client: QueueClient, spawn: Spawn, endpoint: EchoEndpoint
) -> None:
    """An endpoint of another version is a lost device: its workers exit, and are restarted."""
    rng = random.Random(seed)
    texts = prompts(200)
    ids = submit(client, texts)
    workers = [spawn(), spawn()]
    started = list(workers)
    for _ in range(10):
        time.sleep(rng.uniform(0.3, 1.5))
        match rng.choice(["kill", "freeze", "replace", "worker"]):
            case "kill":
                endpoint.kill()
                time.sleep(rng.uniform(0.0, 1.0))
                endpoint.start()
            case "freeze":
                endpoint.signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.5, 7.0))
                endpoint.signal(signal.SIGCONT)
            case "replace":
                endpoint.kill()
                endpoint.start(version=f"2.{rng.random()}")
            case "worker":
                workers[rng.randrange(2)].kill()
        for index, worker in enumerate(workers):
            if not worker.is_alive:
                workers[index] = spawn()
                started.append(workers[index])
    while client.counts("all").ended < len(ids):  # the last fault may still stop a worker
        for index, worker in enumerate(workers):
            if not worker.is_alive:
                workers[index] = spawn()
                started.append(workers[index])
                assert len(started) <= 40
        time.sleep(0.05)
    check(client, ids, texts, [])
