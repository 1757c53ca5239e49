"""Finding jobs in a queue of any size: the results, their order, and the small cost of each step."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.client import job_search
from pagemill.producer.client.job_search import FoundJobs
from pagemill.producer.wire.calls import job_lists
from pagemill.producer.wire.calls.job_lists import JobFilter
from pagemill.producer.wire.schema.errors import InvalidJob
from tests.conftest import RedisServer
from tests.producer.driving import DECODE, Queue, delta


def find(queue: Queue, *, batch: str = "", after: str = "", limit: int = 50, **wanted: str) -> FoundJobs:
    with Producer(queue.url, queue=queue.name) as producer:
        flow = job_search.search(queue.name, JobFilter(**wanted), batch=batch, after=after, limit=limit)
        return producer.run_flow(flow)


def find_all(queue: Queue, **asked: Any) -> list[str]:
    """The ids of all pages."""
    found, after = [], ""
    while True:
        page = find(queue, after=after, **asked)
        found += [job.id for job in page.jobs]
        if not (after := page.after):
            return found


def test_each_state_has_its_list(queue: Queue) -> None:
    queue.submit("ran", "runs", "bad", "dead")
    ran, runs, bad, dead = queue.pull()
    queue.checkpoint(runs, delta(0, 1, 2))
    queue.commit(ran)
    queue.fail(bad)
    queue.fail(dead, "dead")
    queue.submit("later", delay=60)
    queue.submit("waits", tenant="acme", model="other", priority="high", metadata={"x": 1})
    for state, job_id in {
        "succeeded": "ran", "running": "runs", "failed": "bad", "dead": "dead", "delayed": "later", "queued": "waits",
    }.items():  # fmt: skip
        assert find_all(queue, state=state) == [job_id]
    assert sorted(find_all(queue)) == sorted(["ran", "runs", "bad", "dead", "later", "waits"])
    (running,) = find(queue, state="running").jobs
    assert (running.worker, running.attempt, running.progress.generated_tokens) == (
        "w1",
        1,
        DECODE.generated_tokens,
    )
    (waiting,) = find(queue, state="queued", tenant="acme").jobs
    assert (waiting.tenant, waiting.model, waiting.priority) == ("acme", "other", "high")
    assert find_all(queue, state="queued", tenant="nobody") == find_all(queue, tenant="nobody") == []
    assert find_all(queue, state="queued", model="other") == find_all(queue, model="other") == ["waits"]


def test_a_batch_a_key_and_an_idempotency_key_are_found(queue: Queue) -> None:
    queue.submit("a", batch_id="b1", key="row 7")
    queue.submit("b", batch_id="b1", key="row 8", tenant="acme")
    queue.submit("c", idempotency_key="order-1", tenant="acme")
    queue.submit("d", idempotency_key="order-1", tenant="other")
    assert find_all(queue, batch="b1") == ["a", "b"]
    assert find_all(queue, batch="b1", tenant="acme") == find_all(queue, key="row 8") == ["b"]
    assert find(queue, key="order-1", tenant="acme").jobs[0].id == "c", "at once, before any walk"
    assert sorted(find_all(queue, key="order-1")) == ["c", "d"]
    assert find_all(queue, batch="none") == []


def test_lists_are_read_page_by_page_in_order(valkey_queue: Queue) -> None:
    queue = valkey_queue
    for tenant in ("t1", "t2", "t3"):
        queue.submit(*(f"{tenant}-{i:03d}" for i in range(120)), tenant=tenant)
    queue.submit("first", tenant="zz", priority="high")
    expected = ["first", *(f"{tenant}-{i:03d}" for tenant in ("t1", "t2", "t3") for i in range(120))]
    assert find_all(queue, state="queued", limit=50) == expected
    assert find_all(queue, state="queued", tenant="t2", limit=7) == [f"t2-{i:03d}" for i in range(120)]
    queue.submit(*(f"later-{i:03d}" for i in range(120)), delay=60, batch_id="b")
    assert find_all(queue, state="delayed", limit=25) == find_all(queue, batch="b", limit=33)


@pytest.mark.parametrize("after", ["x", "-1", "1e3", "9" * 21, "99999999999999999999", "1~lane~x", "\u0661"])
@pytest.mark.parametrize("state", ["", "running", "queued"])
def test_a_place_that_is_not_ours_is_refused_or_harmless(valkey_queue: Queue, after: str, state: str) -> None:
    valkey_queue.submit("a")
    try:
        find(valkey_queue, state=state, after=after)
    except InvalidJob:
        return
    assert (state, after) == ("queued", "1~lane~x")


@pytest.mark.slow
def test_a_search_through_very_many_jobs_is_a_bounded_number_of_short_steps(own_valkey: RedisServer) -> None:
    """If no job matches, a page searches a part of the keyspace and reports where to continue."""
    queue = _large(own_valkey)
    client = queue.client
    client.config_resetstat()
    steps = 0
    after, looked = "", 0
    while True:
        page = find(queue, state="failed", after=after)
        steps += 1
        assert page.jobs == []
        assert page.looked <= job_search.MAX_STEPS * 2 * job_lists.LOOK_JOBS
        looked += page.looked
        if not (after := page.after):
            break
    assert steps > 1, "more keys than one page looks at"
    assert looked >= 30_000, "every job was looked at"
    commands = client.info("commandstats")
    assert "cmdstat_keys" not in commands
    assert commands["cmdstat_scan"]["calls"] <= steps * job_search.MAX_STEPS
    # The first content of the page does not need a walk.
    client.config_resetstat()
    assert len(find(queue, state="queued").jobs) == 50
    assert len(find(queue, batch="big", limit=50).jobs) == 50
    commands = client.info("commandstats")
    assert "cmdstat_scan" not in commands
    assert commands["cmdstat_hmget"]["calls"] <= 200
    queue.transport.close()


def _large(server: RedisServer) -> Queue:
    from tests.producer.driving import open_queue

    queue = open_queue(server.url, "q")
    for start in range(0, 30_000, 1000):
        queue.submit(*(f"j{i}" for i in range(start, start + 1000)), batch_id="big")
    return queue
