"""The server is killed, slow, full, unreachable or replaced, or its clock differs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from pagemill import Producer
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.schema.errors import QueueFull, RedisUnavailable
from tests.chaos import invariants
from tests.chaos.conftest import Spawn, on_both_hosts
from tests.chaos.fork_server import ForkServer, check_alive
from tests.chaos.tcp_proxy import TcpProxy
from tests.conftest import RedisServer
from tests.server_clock import clocked_server
from tests.topologies import sentinel_setup, until
from tests.worker.harness import QueueClient, eventually, process_settings

T = TypeVar("T")


def prompts(jobs: int) -> list[str]:
    return [f"{i:03d} " * random.Random(i).randint(15, 50) for i in range(jobs)]


def submit(client: QueueClient, texts: Sequence[str]) -> list[str]:
    jobs = ({"prompt": text, "max_tokens": len(text), "stream": i % 3 == 0} for i, text in enumerate(texts))
    return client.submit(*jobs, batch_id="all")


def check(client: QueueClient, ids: list[str], texts: list[str]) -> None:
    invariants.check_echoes(invariants.check(client, ids), texts)


def middle(client: QueueClient) -> bool:
    counts = client.counts("all")
    return counts.succeeded >= 5 and counts.running >= 3


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
@on_both_hosts
def test_kill_9_of_the_server(kills: int, client: QueueClient, spawn: Spawn, own_valkey: RedisServer) -> None:
    """appendfsync everysec: the kernel still writes the data that a killed process has written."""
    rng = random.Random(kills)
    texts = prompts(kills * 30)
    ids = submit(client, texts)
    workers = [spawn(), spawn()]
    eventually(lambda: len(client.workers()) == 2, "both to be there: without a server none starts")
    for _ in range(kills):
        time.sleep(rng.uniform(0.3, 1.2))
        own_valkey.kill()
        time.sleep(rng.uniform(0.0, 0.5))
        own_valkey.start()
    check(client, ids, texts)
    check_alive(workers)


@pytest.fixture
def proxy(own_valkey: RedisServer) -> Iterator[TcpProxy]:
    with TcpProxy(own_valkey.port) as proxy:
        yield proxy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "calm_s"),
    [(5, 0.3), pytest.param(60, 0.5, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
@on_both_hosts
def test_the_network_misbehaves(
    faults: int, calm_s: float, client: QueueClient, spawn: Spawn, proxy: TcpProxy
) -> None:
    """Resets, partitions that look like silence, missing replies, refusal, slowness: alternately, at random."""
    rng = random.Random(faults)
    texts = prompts(faults * 12)
    ids = submit(client, texts)
    workers = [spawn(redis_url=proxy.url), spawn(redis_url=proxy.url)]
    eventually(lambda: middle(client) and len(client.workers()) == 2, "the middle of the run")
    for number in range(faults):
        match number % 5:
            case 0:
                proxy.reset_all()
            case 1:
                proxy.set_mode("silent")
            case 2:
                proxy.set_mode("deaf")
            case 3:
                proxy.set_mode("refuse")
                proxy.reset_all()
            case 4:
                proxy.set_mode("pass", delay_s=0.05)
        time.sleep(rng.uniform(0.1, 1.5))
        proxy.set_mode("pass")
        if rng.random() < 0.5:
            proxy.reset_all()
        time.sleep(calm_s)
    check(client, ids, texts)
    check_alive(workers)


@pytest.mark.slow
def test_one_worker_is_cut_off_and_the_other_goes_on(
    client: QueueClient, spawn: Spawn, proxy: TcpProxy
) -> None:
    texts = prompts(40)
    ids = submit(client, texts)
    cut = spawn(redis_url=proxy.url)
    eventually(lambda: middle(client), "the middle of the run")
    proxy.set_mode("silent")
    spawn()
    check(client, ids, texts)
    proxy.set_mode("pass")  # its leases are worthless by now
    proxy.reset_all()
    eventually(lambda: "is back" in cut.log(), "the other to come back")
    check(client, ids, texts)
    assert cut.is_alive


@pytest.mark.slow
def test_a_producer_behind_a_bad_network(client: QueueClient, spawn: Spawn, proxy: TcpProxy) -> None:
    """Its connections are reset all the time: each job arrives once, each outcome is read once."""
    jobs = 1000
    calm = threading.Event()

    def disturb() -> None:
        while not calm.wait(0.3):
            proxy.reset_all()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    spawn(model="echo", max_num_seqs=64)
    rows = [{"prompt": f"{i:04d}", "model": "echo", "max_tokens": 4, "key": str(i)} for i in range(jobs)]
    try:
        with Producer(proxy.url, queue=client.queue) as producer:
            batch = stubbornly(lambda: producer.submit_many(rows, batch_id="all"))
            read: dict[str, str] = {}
            for item in batch.results():
                assert item.result is not None
                assert item.key not in read, "an end was told twice"
                read[item.key] = item.result.text
            single = stubbornly(lambda: producer.submit(prompt="single", model="echo", job_id="single"))
            assert single.result(timeout=120).text == "single"
    finally:
        calm.set()
        disturber.join()
    assert read == {str(i): f"{i:04d}" for i in range(jobs)}
    assert client.stats().counts["succeeded"] == jobs + 1


def stubbornly(submit: Callable[[], T]) -> T:
    """Submit until a reply arrives; the same ids make repetitions harmless."""
    for _ in range(100):
        try:
            return submit()
        except RedisUnavailable:
            time.sleep(0.05)
    raise AssertionError("a hundred tries, and no answer")


@pytest.mark.slow
def test_a_slow_server(client: QueueClient, spawn: Spawn, proxy: TcpProxy) -> None:
    texts = prompts(60)
    ids = submit(client, texts)
    proxy.set_mode("pass", delay_s=0.15)
    spawn(redis_url=proxy.url)
    spawn(redis_url=proxy.url)
    for _ in range(10):
        client.redis.client_pause(400, all=True)
        time.sleep(0.7)
    check(client, ids, texts)


@pytest.mark.slow
def test_a_full_server_refuses_jobs_and_takes_every_end(client: QueueClient, spawn: Spawn) -> None:
    client.redis.config_set("maxmemory-policy", "noeviction")
    texts = prompts(40)
    ids = submit(client, texts)
    spawn()
    eventually(lambda: middle(client), "the middle of the run")
    running = [job_id for job_id in ids if client.status(job_id).state == "running"]
    client.redis.config_set("maxmemory", 1)
    with Producer(client.url, queue=client.queue) as producer, pytest.raises(QueueFull):
        producer.submit(prompt="refused", model="echo")
    until(lambda: all(client.status(job_id).done for job_id in running), "running jobs to commit")
    client.redis.config_set("maxmemory", 0)
    check(client, ids, texts)


@pytest.mark.slow
def test_the_servers_clock_is_set(tmp_path: Path, queue_name: str) -> None:
    """An hour ahead: every lease has expired, and workers compete. An hour back: none would expire for an hour."""
    with clocked_server(tmp_path) as server:
        client = QueueClient(server.url, queue_name)
        with ForkServer(tmp_path, process_settings(server.url, queue_name)) as fork_server:
            texts = prompts(60)
            ids = submit(client, texts)
            victim = fork_server.spawn()
            fork_server.spawn()
            eventually(lambda: middle(client), "the middle of the run")
            for step in (3600, -3600, 0):
                server.set(step)
                time.sleep(0.6)
            server.set(-3600)
            victim.kill()  # by the clock, its leases last for another hour
            check(client, ids, texts)
        client.redis.close()


def test_leases_from_before_a_step_back_do_not_hold_jobs_for_ever(client: QueueClient) -> None:
    (job_id,) = client.submit({"prompt": "p"})
    client.run(transitions.pull(client.queue, "gone", ["echo"], 1, 10**9, 6000))
    an_hour_ahead = {job_id: int((time.time() + 3600) * 1000)}
    client.redis.zadd(f"pagemill:{{{client.queue}}}:leases", an_hour_ahead)
    client.run(transitions.sweep(client.queue))
    (_, expiry), *_ = client.redis.zrange(f"pagemill:{{{client.queue}}}:leases", 0, -1, withscores=True)
    assert expiry < (time.time() + 700) * 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_sentinel_fails_over_under_load(seed: int, tmp_path: Path, queue_name: str) -> None:
    """Everything had been replicated: no data is lost, and committed results stay committed."""
    texts = prompts(80)
    with (
        sentinel_setup(tmp_path, sentinels=3) as setup,
        QueueClient(setup.master.url, queue_name) as client,
        ForkServer(tmp_path, process_settings(setup.url, queue_name)) as fork_server,
    ):
        ids = submit(client, texts)
        fork_server.spawn(), fork_server.spawn()
        eventually(lambda: middle(client), "the middle of the run")
        time.sleep(random.Random(seed).uniform(0.0, 1.0))
        assert client.redis.wait(1, 5000) == 1
        setup.master.kill()
        until(lambda: setup.master_port() == setup.replica.port, "the replica to be promoted")
        after = QueueClient(setup.replica.url, queue_name)
        check(after, ids, texts)
        after.redis.close()
