"""A server that is killed, restarted, loses its scripts, or runs out of memory."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis

from pagemill import AsyncProducer, Producer, QueueFull, RedisUnavailable
from pagemill.producer.wire.calls import batches, reads, transitions
from pagemill.producer.wire.server import scripts
from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.server.transport import SyncTransport
from tests.conftest import RedisServer
from tests.producer.driving import Queue, delta, result_json
from tests.producer.scripted_worker import scripted_worker


def test_what_was_acknowledged_survives_kill_9(own_valkey: RedisServer, own_queue: Queue) -> None:
    own_queue.client.config_set("appendfsync", "always")
    own_queue.submit("a", "b", "c")
    a, b, _ = own_queue.pull()
    own_queue.checkpoint(a, delta(0, 1, 2))
    own_queue.commit(b)
    own_valkey.kill()
    own_valkey.start()
    assert [own_queue.state(job_id) for job_id in "abc"] == ["running", "succeeded", "running"]
    assert own_queue.commit(b) == "already_done"
    assert own_queue.checkpoint(a, delta(2, 3)) == "ok"
    assert own_queue.commit(a) == "committed"


@pytest.mark.slow
def test_an_unlimited_wait_survives_a_restart(own_valkey: RedisServer, own_queue: Queue) -> None:
    with redis.Redis.from_url(own_valkey.url) as client:
        client.config_set("appendfsync", "always")  # on a busy disk, the default may write seconds later
    with Producer(own_valkey.url, queue="q") as producer:
        handle = producer.submit(prompt="p", model="m")
        batch = producer.submit_many([{"prompt": "p", "model": "m"}])
        texts: list[str] = []
        counts: list[int] = []
        waits = [
            threading.Thread(target=lambda: texts.append(handle.result().text)),
            threading.Thread(target=lambda: counts.append(batch.wait().succeeded)),
        ]
        for wait in waits:
            wait.start()
        own_valkey.kill()
        with pytest.raises(RedisUnavailable):
            handle.status()
        own_valkey.start()
        with scripted_worker(own_valkey.url, "q"):
            for wait in waits:
                wait.join(timeout=120)
        assert (texts, counts) == (["p"], [1])


@pytest.mark.slow
def test_forgotten_scripts_are_taught_again_in_order(own_queue: Queue) -> None:
    own_queue.submit("a", "b")
    a, b = own_queue.pull()
    own_queue.client.script_flush()
    calls = [
        transitions.retry(own_queue.name, "a", a.token, error(), 0.0),
        transitions.release(own_queue.name, "b", b.token),
        transitions.release(own_queue.name, "b", b.token),
    ]
    assert own_queue.transport.run_many(calls) == ["retrying", "released", "already_done"]
    own_queue.client.script_flush()
    assert own_queue.state("b") == "queued"


def running(queue: Queue, count: int) -> list[Call[Any]]:
    """Running jobs of a batch; returns their commits."""
    queue.submit(*(f"j{number:02}" for number in range(count)), batch_id="batch")
    return [
        transitions.commit(queue.name, job.job_id, job.token, "succeeded", result_json(job.job_id))
        for job in queue.pull(count)
    ]


def ended(queue: Queue) -> tuple[int, int, int]:
    """How many jobs of the batch run, have succeeded, and are in its feed; the queue's own counts agree."""
    found = queue.run(batches.counts(queue.name, "batch"))
    counts = queue.client.hmget(f"{queue.prefix}counts", "running", "succeeded")
    assert [int(count or 0) for count in counts] == [found.running, found.succeeded]
    return found.running, found.succeeded, queue.client.llen(f"{queue.prefix}bfeed:batch")


def test_a_server_that_dies_before_it_answers_joined_commits(
    own_valkey: RedisServer, own_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_queue.client.config_set("appendfsync", "always")
    calls, send = running(own_queue, 80), SyncTransport._send

    def cut(transport: SyncTransport, calls: Sequence[Call[Any]]) -> list[Any]:
        send(transport, calls)
        own_valkey.kill()
        raise redis.ConnectionError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(SyncTransport, "_send", cut)
        with pytest.raises(RedisUnavailable):
            own_queue.transport.run_each(calls)
    own_valkey.start()
    assert ended(own_queue) == (0, 80, 80)
    assert own_queue.transport.run_each(calls) == ["already_done"] * 80
    assert ended(own_queue) == (0, 80, 80)


@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.003])
def test_a_server_that_dies_while_it_runs_joined_commits(
    own_valkey: RedisServer, own_queue: Queue, pause_s: float
) -> None:
    """A script's writes are atomic in the append-only file: either all of its jobs have finished, or none."""
    own_queue.client.config_set("appendfsync", "always")
    calls = running(own_queue, 40)
    (pack,) = scripts.packed(calls)
    joined = scripts.joined(pack)
    own_queue.client.script_load(scripts.source(joined.script))
    connection = own_queue.client.connection_pool.get_connection()
    connection.send_command("EVALSHA", scripts.sha1(joined.script), 1, *joined.keys, *joined.args)
    time.sleep(pause_s)
    own_valkey.kill()
    connection.disconnect()
    own_queue.client.connection_pool.release(connection)
    own_valkey.start()
    assert ended(own_queue) in ((40, 0, 0), (0, 40, 40))
    assert set(own_queue.transport.run_each(calls)) in ({"committed"}, {"already_done"})
    assert ended(own_queue) == (0, 40, 40)


def error() -> transitions.ErrorInfo:
    return transitions.ErrorInfo(code="engine_error", message="it broke", retryable=True)


def test_at_maxmemory_submits_are_refused_and_running_jobs_still_end(own_queue: Queue) -> None:
    ids = ["commit", "fail", "retry", "release", "checkpoint", "beside"]
    own_queue.submit(*ids)
    own_queue.submit("lead", "follow", dedupe=True, temperature=0.0)
    jobs = {job.job_id: job for job in own_queue.pull()}
    own_queue.submit("waiting")
    own_queue.client.config_set("maxmemory-policy", "noeviction")
    own_queue.client.config_set("maxmemory", 1)
    with pytest.raises(QueueFull, match="maxmemory"):
        own_queue.submit("refused")
    held = [(job.job_id, job.token) for job in jobs.values()]
    assert own_queue.run(transitions.renew("q", "w1", held)).lost == []
    assert own_queue.checkpoint(jobs["checkpoint"], delta(0, 1)) == "ok"
    assert own_queue.commit(jobs["commit"]) == "committed"
    lead, beside = (
        transitions.commit("q", name, jobs[name].token, "succeeded", result_json(name))
        for name in ("lead", "beside")
    )
    assert own_queue.transport.run_many([lead, beside]) == ["committed"] * 2
    assert own_queue.state("follow") == "succeeded"
    assert own_queue.fail(jobs["fail"]) == "committed"
    assert own_queue.retry(jobs["retry"]) == "retrying"
    assert own_queue.release(jobs["release"]) == "released"
    assert own_queue.cancel("waiting") == "cancelled"
    assert {job.job_id for job in own_queue.pull()} == {"release", "retry"}
    own_queue.client.config_set("maxmemory", 0)
    own_queue.lapse("checkpoint")
    own_queue.client.config_set("maxmemory", 1)
    assert own_queue.run(transitions.sweep("q")).reclaimed == 1
    assert own_queue.run(reads.outcome("q", "commit")).result is not None
    assert "job:refused" not in own_queue.names()


def ask(url: str) -> None:
    Producer(url).job("j").status()


def ask_async(url: str) -> None:
    async def status() -> None:
        async with AsyncProducer(url) as producer:
            await producer.job("j").status()

    asyncio.run(status())


@pytest.mark.parametrize("request_status", [ask, ask_async])
def test_a_silent_server_is_tried_three_times(request_status: Callable[[str], None]) -> None:
    """The handshake does not retry: with the default timeout of 15 s, retries would add up to minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}?socket_timeout=0.1"
        with pytest.raises(RedisUnavailable):
            request_status(url)
        silent.setblocking(False)
        for _ in range(3):
            silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()
