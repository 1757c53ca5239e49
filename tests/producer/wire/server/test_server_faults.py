"""A server that is killed, restarted, forgets its scripts, or is out of memory."""

from __future__ import annotations

import threading

import pytest

from pagemill import Producer, QueueFull, RedisUnavailable
from pagemill.producer.wire.calls import reads, transitions
from tests.conftest import RedisServer
from tests.producer.driving import Queue, delta
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


def test_an_unlimited_wait_survives_a_restart(own_valkey: RedisServer, own_queue: Queue) -> None:
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


def error() -> transitions.ErrorInfo:
    return transitions.ErrorInfo(code="engine_error", message="it broke", retryable=True)


def test_at_maxmemory_submits_are_refused_and_running_jobs_still_end(own_queue: Queue) -> None:
    ids = ["commit", "fail", "retry", "release", "checkpoint"]
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
    assert own_queue.commit(jobs["lead"]) == "committed"
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
