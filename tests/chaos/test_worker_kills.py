"""Workers and servers die in the middle of jobs; every job still ends, once."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from producer.wire.reading import Outcome
from tests.conftest import RedisServer
from tests.worker.harness import QueueClient, WorkerProcess, eventually, process_settings

Spawn = Callable[..., WorkerProcess]
JOBS = 100


@pytest.fixture
def client(own_valkey: RedisServer, queue_name: str) -> Iterator[QueueClient]:
    client = QueueClient(own_valkey.url, queue_name)
    yield client
    client.redis.close()


@pytest.fixture
def spawn(own_valkey: RedisServer, queue_name: str, tmp_path: Path) -> Iterator[Spawn]:
    spawned: list[WorkerProcess] = []

    def start(**settings: Any) -> WorkerProcess:
        process = WorkerProcess(
            process_settings(own_valkey.url, queue_name, **settings), tmp_path / f"worker-{len(spawned)}.log"
        )
        spawned.append(process)
        return process

    yield start
    for process in spawned:
        process.kill()


def prompts(jobs: int = JOBS) -> list[str]:
    """A prompt each, of 100 to 300 tokens: half a second to one and a half of echo:5."""
    return [f"{i:03d} " * random.Random(i).randint(25, 75) for i in range(jobs)]


def submit(client: QueueClient, texts: list[str]) -> list[str]:
    jobs = ({"prompt": text, "max_tokens": len(text), "stream": i % 3 == 0} for i, text in enumerate(texts))
    return client.submit(*jobs, batch_id="all")


def running_and_ended(client: QueueClient) -> bool:
    """Some jobs have ended, some run with tokens on record, some wait: the middle."""
    counts = client.counts("all")
    return counts.succeeded >= 10 and counts.running >= 5 and counts.queued >= 10


def check_all_ended_once(client: QueueClient, ids: list[str], texts: list[str]) -> list[Outcome]:
    outcomes = client.wait(ids, patience_s=120)
    for outcome, text in zip(outcomes, texts, strict=True):
        result = outcome.value()
        assert result is not None
        assert (result.text, result.token_ids) == (text, tuple(text.encode()))
        assert result.usage.completion_tokens == len(text)
    counts = client.counts("all")
    assert (counts.total, counts.succeeded) == (len(ids), len(ids))
    stats = client.stats()
    assert stats.counts["succeeded"] == len(ids)  # an end that was committed twice would be counted twice
    assert stats.counts.get("running", 0) == stats.counts.get("queued", 0) == stats.leases == 0
    return outcomes


def commits(*processes: WorkerProcess) -> int:
    return sum(len(re.findall(r"job \w+: succeeded", process.log())) for process in processes)


def test_sigkill_in_the_middle_of_100_jobs_and_a_restart(client: QueueClient, spawn: Spawn) -> None:
    texts = prompts()
    ids = submit(client, texts)
    first = spawn()
    eventually(lambda: running_and_ended(client), "the middle of the run")
    first.kill()
    interrupted = [job_id for job_id in ids if client.status(job_id).state == "running"]
    assert interrupted
    second = spawn()
    outcomes = check_all_ended_once(client, ids, texts)
    resumed = [o for o in outcomes if o.job_id in interrupted and o.result and o.result.resumed_tokens]
    assert resumed, "no interrupted job went on from its checkpoint"
    # A commit whose log line the kill took is possible, two commits of a job are not.
    assert JOBS - 16 <= commits(first, second) <= JOBS


def test_one_of_two_workers_is_killed(client: QueueClient, spawn: Spawn) -> None:
    texts = prompts()
    ids = submit(client, texts)
    workers = [spawn(), spawn()]
    eventually(lambda: running_and_ended(client) and len(client.workers()) == 2, "both to be busy")
    workers[0].kill()
    check_all_ended_once(client, ids, texts)
    assert commits(workers[1]) > 0


def test_a_frozen_worker_is_fenced_when_it_thaws(client: QueueClient, spawn: Spawn) -> None:
    texts = prompts(32)
    ids = submit(client, texts)
    frozen = spawn()
    eventually(lambda: client.counts("all").running >= 10, "the first worker to be busy")
    eventually(lambda: sum(client.generated(job_id) > 0 for job_id in ids) >= 5, "tokens on record")
    frozen.signal(signal.SIGSTOP)
    rescuer = spawn()
    eventually(lambda: commits(rescuer) >= 5, "the other worker to take over")
    frozen.signal(signal.SIGCONT)
    check_all_ended_once(client, ids, texts)
    assert "lost its lease" in frozen.log()
    assert commits(frozen, rescuer) == len(ids)


def test_the_server_is_killed_and_comes_back(
    client: QueueClient, spawn: Spawn, own_valkey: RedisServer
) -> None:
    texts = prompts()
    ids = submit(client, texts)
    worker = spawn()
    eventually(lambda: running_and_ended(client), "the middle of the run")
    own_valkey.kill()
    eventually(lambda: "Redis does not answer" in worker.log(), "the worker to notice")
    own_valkey.start()
    check_all_ended_once(client, ids, texts)
    assert "Redis is back after" in worker.log()
    assert worker.process.poll() is None


def test_an_outage_shorter_than_a_lease_interrupts_nothing(
    client: QueueClient, spawn: Spawn, own_valkey: RedisServer
) -> None:
    texts = prompts(16)
    worker = spawn(lease_s=30.0)
    ids = submit(client, texts)
    eventually(lambda: sum(client.generated(job_id) > 0 for job_id in ids) == 16, "all jobs to generate")
    own_valkey.stop()
    eventually(lambda: "Redis does not answer" in worker.log(), "the worker to notice")
    time.sleep(1.5)  # jobs end meanwhile: their results must be held
    own_valkey.start()
    outcomes = check_all_ended_once(client, ids, texts)
    assert all(outcome.result and outcome.result.resumed_tokens == 0 for outcome in outcomes)
    assert "lost its lease" not in worker.log()
    assert commits(worker) == 16


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_workers_and_server_die_at_random(
    seed: int, client: QueueClient, spawn: Spawn, own_valkey: RedisServer
) -> None:
    rng = random.Random(seed)
    texts = prompts(200)
    ids = submit(client, texts)
    workers = [spawn(), spawn()]
    for _ in range(8):
        time.sleep(rng.uniform(0.2, 1.5))
        victim = rng.randrange(len(workers))
        match rng.choice(["kill", "kill", "freeze", "drain", "server"]):
            case "kill":
                workers[victim].kill()
                workers[victim] = spawn()
            case "freeze":
                workers[victim].signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.5, 2.5))
                workers[victim].signal(signal.SIGCONT)
            case "drain":
                workers[victim].signal(signal.SIGTERM)
                workers[victim] = spawn()
            case "server":
                own_valkey.kill()
                time.sleep(rng.uniform(0.0, 1.0))
                own_valkey.start()
    check_all_ended_once(client, ids, texts)
