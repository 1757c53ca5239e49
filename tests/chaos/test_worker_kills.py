"""Workers crash, freeze, hang and drain in the middle of jobs; every job still finishes once with the right result."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections.abc import Sequence

import pytest

from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.reads import Outcome
from tests.chaos import invariants
from tests.chaos.conftest import Spawn, on_both_hosts
from tests.chaos.fork_server import ForkedWorker
from tests.conftest import RedisServer
from tests.worker.harness import QueueClient, eventually

JOBS = 100


def prompts(jobs: int = JOBS) -> list[str]:
    """A prompt each, of 100 to 300 tokens: half a second to one and a half of echo:5."""
    return [f"{i:03d} " * random.Random(i).randint(25, 75) for i in range(jobs)]


def submit(client: QueueClient, texts: Sequence[str]) -> list[str]:
    jobs = ({"prompt": text, "max_tokens": len(text), "stream": i % 3 == 0} for i, text in enumerate(texts))
    return client.submit(*jobs, batch_id="all")


def running_and_ended(client: QueueClient) -> bool:
    """Some jobs have finished, some run with tokens on record, some wait: the middle."""
    counts = client.counts("all")
    return counts.succeeded >= 10 and counts.running >= 5 and counts.queued >= 10


def check_all_ended_once(client: QueueClient, ids: list[str], texts: list[str]) -> list[Outcome]:
    outcomes = invariants.check(client, ids)
    invariants.check_echoes(outcomes, texts)
    return outcomes


def commits(*processes: ForkedWorker) -> int:
    return sum(len(re.findall("job succeeded", process.log())) for process in processes)


@on_both_hosts
def test_sigkill_in_the_middle_of_100_jobs_and_a_restart(client: QueueClient, spawn: Spawn) -> None:
    texts = prompts()
    ids = submit(client, texts)
    first = spawn()
    eventually(lambda: running_and_ended(client), "the middle of the run")
    first.kill()
    interrupted = [job_id for job_id in ids if client.status(job_id).state == "running"]
    assert interrupted
    spawn()
    outcomes = check_all_ended_once(client, ids, texts)
    resumed = [o for o in outcomes if o.job_id in interrupted and o.result and o.result.resumed_tokens]
    assert resumed, "no interrupted job went on from its checkpoint"


@pytest.mark.slow
@on_both_hosts
def test_one_of_two_workers_is_killed(client: QueueClient, spawn: Spawn) -> None:
    texts = prompts()
    ids = submit(client, texts)
    workers = [spawn(), spawn()]
    eventually(lambda: running_and_ended(client) and len(client.workers()) == 2, "both to be busy")
    workers[0].kill()
    check_all_ended_once(client, ids, texts)
    assert commits(workers[1]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@on_both_hosts
def test_workers_are_killed_at_random_points(kills: int, client: QueueClient, spawn: Spawn) -> None:
    """In every activity of a worker: starting, pulling, announcing, stepping, checkpointing, committing, exiting."""
    rng = random.Random(kills)
    texts = prompts(kills * 4)
    ids = submit(client, texts)
    workers = [spawn() for _ in range(2)]
    for _ in range(kills):
        time.sleep(rng.uniform(0.0, 1.0))
        victim = rng.randrange(2)
        if rng.random() < 0.2:  # in the middle of a drain
            workers[victim].signal(signal.SIGTERM)
            time.sleep(rng.uniform(0.0, 0.2))
        workers[victim].kill()
        workers[victim] = spawn()
    outcomes = invariants.check(client, ids)
    # With a crash every half second, a job may meet five in a row without progress, and is then a suspect.
    unlucky = [index for index, outcome in enumerate(outcomes) if outcome.state == "dead"]
    assert len(unlucky) <= kills / 50
    for index in unlucky:
        assert outcomes[index].error is not None
        assert outcomes[index].error.code == "crash_suspect"
    lucky = [index for index in range(len(texts)) if index not in unlucky]
    invariants.check_echoes([outcomes[index] for index in lucky], [texts[index] for index in lucky])


@pytest.mark.slow
@on_both_hosts
def test_a_frozen_worker_is_fenced_when_it_thaws(client: QueueClient, spawn: Spawn) -> None:
    texts = prompts()
    ids = submit(client, texts)
    frozen = spawn()
    eventually(lambda: running_and_ended(client), "the middle of the run")
    frozen.signal(signal.SIGSTOP)
    rescuer = spawn()
    # Commits alone would not suffice: a fast second worker commits waiting jobs, before any lease has expired.
    eventually(
        lambda: re.search("job taken over .*resumed_tokens=[1-9]", rescuer.log()),
        "the other worker to take over",
    )
    frozen.signal(signal.SIGCONT)
    check_all_ended_once(client, ids, texts)
    # With the next renewal, or with an earlier commit.
    eventually(
        lambda: re.search("lost its lease|belongs to another worker", frozen.log()),
        "the thawed worker to notice",
    )


@pytest.mark.slow
def test_a_hung_engine_loses_its_jobs_to_a_healthy_one(client: QueueClient, spawn: Spawn) -> None:
    """The process lives, its threads renew and respond; only its steps never finish."""
    texts = [f"{i} \x08" if i == 0 else f"{i:03d} " * 25 for i in range(20)]
    ids = submit(client, texts)
    hung = spawn(engine_stall_s=1.0)
    eventually(lambda: "nowhere" in hung.log(), "the first worker to say that it hangs")
    spawn()
    check_all_ended_once(client, ids, texts)
    hung.wait()  # a supervisor restarts it


@pytest.mark.slow
def test_a_job_that_kills_its_workers_is_buried_and_the_others_lose_nothing(
    client: QueueClient, spawn: Spawn
) -> None:
    texts = [f"{i:03d} " * 25 for i in range(64)]
    ids = submit(client, texts[:32])
    poison = client.submit({"prompt": "\x07", "max_tokens": 1}, batch_id="all")
    ids += submit(client, texts[32:])
    workers = [spawn() for _ in range(2)]
    deaths = 0
    while client.status(poison[0]).state in ("queued", "running"):
        for index, worker in enumerate(workers):
            if not worker.is_alive:
                deaths += 1
                assert deaths <= 10
                workers[index] = spawn()
        time.sleep(0.02)
    outcomes = invariants.check(client, [*ids, *poison])
    invariants.check_echoes(outcomes[:-1], texts)
    assert outcomes[-1].state == "dead"
    assert outcomes[-1].error is not None
    assert outcomes[-1].error.code == "crash_suspect"


@pytest.mark.slow
def test_jobs_are_taken_over_within_ten_seconds_by_default(client: QueueClient, spawn: Spawn) -> None:
    (job_id,) = client.submit({"prompt": "x" * 2000, "max_tokens": 2000})
    defaults = {"lease_s": 6.0, "renew_s": 2.0, "checkpoint_s": 1.0}
    first = spawn(**defaults)
    eventually(lambda: client.generated(job_id) > 0, "the first tokens")
    second = spawn(**defaults)
    eventually(lambda: len(client.workers()) == 2, "the other worker to be there")
    owner = client.status(job_id).worker or ""
    victim, rescuer = (first, second) if f"-{first.pid}-" in owner else (second, first)
    victim.kill()
    killed_at = client.redis.time()[0]
    eventually(lambda: f"-{rescuer.pid}-" in (client.status(job_id).worker or ""), "the takeover")
    started_at = client.status(job_id).started_at
    assert started_at is not None
    assert started_at - killed_at <= 10  # by the server's clock: a lease of 6 s, a sweep every 2 s
    client.cancel(job_id)


@pytest.mark.slow
@on_both_hosts
def test_a_drained_worker_hands_back_and_another_goes_on(client: QueueClient, spawn: Spawn) -> None:
    texts = prompts(24)
    ids = submit(client, texts)
    leaving = spawn(drain_grace_s=0.0)
    eventually(lambda: sum(client.generated(job_id) > 0 for job_id in ids) >= 10, "tokens on record")
    running = [job_id for job_id in ids if client.status(job_id).state == "running"]
    leaving.signal(signal.SIGTERM)
    leaving.wait()
    assert client.counts("all").running == 0, "it left holding jobs"
    for job_id in running:
        status = client.status(job_id)
        assert status.done or (status.state, status.crashes) == ("queued", 0)
    spawn()
    outcomes = check_all_ended_once(client, ids, texts)
    assert any(o.result and o.result.resumed_tokens for o in outcomes if o.job_id in running)


@pytest.mark.slow
def test_two_parties_reclaim_at_once(own_valkey: RedisServer, client: QueueClient) -> None:
    """Eight sweep and pull in parallel; every expired job goes to exactly one of them."""
    client.submit(*({"prompt": "p"} for _ in range(200)), batch_id="all")
    pull = transitions.pull(client.queue, "gone", ["echo"], 200, 10**9, 1)
    assert len(client.run(pull).jobs) == 200
    time.sleep(0.05)
    barrier, taken = threading.Barrier(8), [[] for _ in range(8)]

    def party(index: int) -> None:
        own = QueueClient(own_valkey.url, client.queue)
        barrier.wait()
        for _ in range(20):
            own.run(transitions.sweep(client.queue))
            call = transitions.pull(client.queue, f"w{index}", ["echo"], 16, 10**9, 60_000)
            taken[index] += [(job.job_id, job.token) for job in own.run(call).jobs]
        own.redis.close()

    threads = [threading.Thread(target=party, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jobs = [job for part in taken for job in part]
    assert len({job_id for job_id, _ in jobs}) == len(jobs) == 200
    for job_id, token in jobs:
        error = '{"code":"invalid_job","message":"m","retryable":false}'
        call = transitions.commit(client.queue, job_id, token, "failed", error_json=error)
        assert client.run(call) == "committed"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@on_both_hosts
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
    spawn()  # one that was just starting when the server crashed has given up
    check_all_ended_once(client, ids, texts)
