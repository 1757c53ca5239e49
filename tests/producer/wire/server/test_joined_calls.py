"""Calls that several jobs make together: one run of a script, with the same effects and replies as separate calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import redis

from pagemill import AsyncProducer
from pagemill.producer.wire.calls import reads, transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import RedisRefused
from pagemill.producer.wire.schema.keys import ended_channel, feed_channel, feeds_channel
from pagemill.producer.wire.schema.outputs import Delta
from pagemill.producer.wire.server import scripts
from pagemill.producer.wire.server.scripts import MAX_JOINED, MAX_JOINED_BYTES, Call
from pagemill.producer.wire.server.transport import AsyncTransport, SyncTransport
from tests.conftest import RedisServer
from tests.producer.driving import DECODE, Queue, delta, result_json

JOBS = MAX_JOINED + 6


def streaming(queue: Queue, count: int = JOBS) -> list[PulledJob]:
    queue.submit(*(f"j{number}" for number in range(count)), stream=True, n=2)
    return queue.pull(count)


def checkpoint(queue: Queue, job: PulledJob, *deltas: Delta, **options: Any) -> Call[Any]:
    return transitions.checkpoint(queue.name, job.job_id, job.token, DECODE, deltas, **options)


def stored(queue: Queue) -> dict[str, Any]:
    """The contents of the jobs' checkpoints and records, without the times."""
    found: dict[str, Any] = {}
    for name in queue.names():
        if name.startswith("ckpt:"):
            found[name] = queue.client.lrange(queue.prefix + name, 0, -1)
        elif name.startswith("job:"):
            record = queue.client.hgetall(queue.prefix + name)
            found[name] = {field: value for field, value in record.items() if field not in TIMES}
    return found


TIMES = {b"progress_at", b"at", b"started_at"}


def steps(queue: Queue, jobs: Sequence[PulledJob]) -> list[list[Call[Any]]]:
    """Calls like those of a few steps: both samples, replays, gaps, invalid samples, restarts, and stale tokens."""
    old = [PulledJob(**{**_fields(job), "token": job.token + 1}) for job in jobs]
    return [
        [checkpoint(queue, job) for job in jobs],
        [checkpoint(queue, job, delta(0, 1, 2), delta(0, 3, index=1)) for job in jobs],
        [checkpoint(queue, job, delta(0, 1, 2), delta(0, 3, index=1)) for job in jobs],
        [checkpoint(queue, job, delta(2 + number % 3, 4)) for number, job in enumerate(jobs)],
        [checkpoint(queue, job, delta(1, 5, index=1 + number % 2)) for number, job in enumerate(jobs)],
        [checkpoint(queue, job, delta(0, 6), restart=number % 2 == 0) for number, job in enumerate(jobs)],
        [checkpoint(queue, job, delta(0, 6), restart=number % 2 == 0) for number, job in enumerate(jobs)],
        [
            checkpoint(queue, (old if number % 5 == 0 else jobs)[number], delta(1, 7))
            for number in range(len(jobs))
        ],
        [checkpoint(queue, job, Delta(index=0, offset=2, finish_reason="stop")) for job in jobs],
        [checkpoint(queue, job, Delta(index=0, offset=2, finish_reason="stop")) for job in jobs],
    ]


def _fields(job: PulledJob) -> dict[str, Any]:
    return {name: getattr(job, name) for name in job.__slots__}


def test_joined_checkpoints_do_what_single_ones_do(queue: Queue) -> None:
    jobs = streaming(queue)
    singly, together = [], []
    for calls in steps(queue, jobs):
        singly.append([queue.run(call) for call in calls])
    expected = stored(queue)
    queue.client.delete(*(queue.prefix + name for name in queue.names()))
    jobs = streaming(queue)
    for calls in steps(queue, jobs):
        together.append(queue.transport.run_many(calls))
    assert together == singly
    assert {reply for replies in singly for reply in replies} == {"ok", "stale", "bad_offset"}
    assert stored(queue) == expected


def test_so_do_joined_reads(queue: Queue) -> None:
    jobs = streaming(queue)
    queue.transport.run_many([checkpoint(queue, job, delta(0, 1, 2)) for job in jobs])
    queue.commit(jobs[3])
    calls = [reads.feed(queue.name, job.job_id, 0, number % 2) for number, job in enumerate(jobs)]
    calls.append(reads.feed(queue.name, "none", 0, 0))
    assert queue.transport.run_many(calls) == [queue.run(call) for call in calls]


def test_a_step_of_many_jobs_is_one_script(own_valkey: RedisServer, own_queue: Queue) -> None:
    """In addition, a token adds a few commands inside the script."""
    jobs = streaming(own_queue, MAX_JOINED)
    own_queue.transport.run_many([checkpoint(own_queue, job, delta(0, 1)) for job in jobs])
    own_queue.client.config_resetstat()
    own_queue.transport.run_many([checkpoint(own_queue, job, delta(1, 2)) for job in jobs])
    own_queue.transport.run_many([reads.feed(own_queue.name, job.job_id, 0, 1) for job in jobs])
    ran = {
        name.removeprefix("cmdstat_"): stat["calls"]
        for name, stat in own_queue.client.info("commandstats").items()
    }
    assert ran["evalsha"] == 2
    assert ran["publish"] == 2
    for name in ("hset", "rpush", "hdel", "lrange"):
        assert ran[name] == MAX_JOINED, name
    assert ran["hmget"] == 2 * MAX_JOINED
    assert sum(ran.values()) < 6 * MAX_JOINED + 12


def test_one_that_is_refused_hurts_no_other(queue: Queue) -> None:
    jobs = streaming(queue, 5)
    queue.client.set(f"{queue.prefix}ckpt:{jobs[2].job_id}", "no list")
    calls = [checkpoint(queue, job, delta(0, 1)) for job in jobs]
    with pytest.raises(RedisRefused):
        queue.transport.run_many(calls)
    assert [queue.run(call) for call in (*calls[:2], *calls[3:])] == ["ok"] * 4
    for number in (0, 1, 3, 4):
        assert len(queue.run(reads.feed(queue.name, jobs[number].job_id, 0, 0)).deltas) == 1


async def test_nor_on_an_event_loop(queue: Queue) -> None:
    jobs = streaming(queue, 5)
    queue.transport.run_many([checkpoint(queue, job, delta(0, 1)) for job in jobs])
    queue.client.delete(f"{queue.prefix}ckpt:{jobs[2].job_id}")
    queue.client.set(f"{queue.prefix}ckpt:{jobs[2].job_id}", "no list")
    async with AsyncProducer(queue.url, queue=queue.name) as producer:
        asked = (producer.run_flow(_one(reads.feed(queue.name, job.job_id, 0, 0))) for job in jobs)
        feeds = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(feeds.pop(2), RedisRefused)
    assert [len(feed.deltas) for feed in feeds] == [1] * 4  # type: ignore[union-attr]


def _one(call: Call[Any]) -> Any:
    value = yield call
    return value


@pytest.mark.slow
async def test_all_streams_of_a_step_are_told_and_read_at_once(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[str]] = []
    send = AsyncTransport._send

    async def counted(transport: AsyncTransport, calls: Sequence[Call[Any]]) -> list[Any]:
        sent.append([call.script for call in calls])
        return await send(transport, calls)

    jobs = streaming(queue, 40)
    queue.transport.run_many([checkpoint(queue, job, delta(0, 1)) for job in jobs])
    async with AsyncProducer(queue.url, queue=queue.name) as producer:
        streams = [aiter(producer.job(job.job_id).stream()) for job in jobs]
        assert {event.text for event in await asyncio.gather(*map(anext, streams))} == {"x"}
        monkeypatch.setattr(AsyncTransport, "_send", counted)
        for token in range(1, 6):
            waits = [asyncio.create_task(anext(stream)) for stream in streams]
            await asyncio.sleep(0.3)  # all have checked once more, and wait
            sent.clear()
            text = str(token)
            await asyncio.to_thread(
                queue.transport.run_many, [checkpoint(queue, job, delta(token, 1, text=text)) for job in jobs]
            )
            assert {event.text for event in await asyncio.gather(*waits)} == {text}
            assert sum(len(names) for names in sent) < len(jobs), "a few joined ones, and late polls"


def hints(queue: Queue, *channels: str) -> tuple[redis.client.PubSub, Any]:
    pubsub = queue.client.pubsub(ignore_subscribe_messages=True)
    pubsub.subscribe(*channels)

    def heard() -> list[tuple[str, str]]:
        # Confirmations of the subscriptions do not count as messages.
        messages = [pubsub.get_message(timeout=0.05) for _ in range(12)]
        return [
            (message["channel"].decode().removeprefix(queue.prefix), message["data"].decode())
            for message in messages
            if message is not None
        ]

    heard()
    return pubsub, heard


@pytest.mark.slow
def test_hints_of_a_step_are_one_message_to_those_who_know_it(queue: Queue) -> None:
    jobs = streaming(queue, 3)
    ids = [job.job_id for job in jobs]
    new, heard = hints(queue, ended_channel(queue.name), feed_channel(queue.name), feeds_channel(queue.name))
    queue.transport.run_many([checkpoint(queue, job, delta(0, 1)) for job in jobs])
    assert heard() == [("feeds", " ".join(ids)), ("feed", "")]
    queue.checkpoint(jobs[0], delta(1, 1))
    assert heard() == [("feed", ids[0])]
    old, heard_by_old = hints(queue, ended_channel(queue.name), feed_channel(queue.name))
    queue.transport.run_many([checkpoint(queue, job, delta(1, 1)) for job in jobs[1:]])
    assert [name for _, name in heard_by_old() if name] == ids[1:]
    assert heard()[0] == ("feeds", " ".join(ids[1:]))
    new.close()
    old.close()


def test_packs_are_neighbours_of_one_queue() -> None:
    def feed(queue: str) -> Call[Any]:
        return reads.feed(queue, "a", 0, 0)

    calls = [feed("q"), feed("q"), feed("r"), reads.ends("q", ["a"]), reads.ends("q", ["a"]), feed("q")]
    assert [len(pack) for pack in scripts.packed(calls)] == [2, 1, 1, 1, 1]
    assert [len(pack) for pack in scripts.packed([feed("q")] * (MAX_JOINED + 1))] == [MAX_JOINED, 1]
    assert scripts.packed([]) == []


def test_packs_have_a_bound_in_bytes() -> None:
    def commit(size: int) -> Call[Any]:
        return transitions.commit("q", "j", 1, "succeeded", "x" * size)

    half = MAX_JOINED_BYTES // 2
    sizes = [0, 0, half - 100, half - 100, half, 2 * MAX_JOINED_BYTES, 0, 0]
    assert [len(pack) for pack in scripts.packed(list(map(commit, sizes)))] == [4, 1, 1, 2]


def test_large_results_are_several_scripts(own_queue: Queue) -> None:
    """Each limit is reached in the middle of a joined send; every job finishes, in order."""
    jobs = streaming(own_queue, MAX_JOINED + 6)
    texts = ["x" * (MAX_JOINED_BYTES // 2 if number in (3, 4, 9) else 1) for number in range(len(jobs))]
    calls = [
        transitions.commit(own_queue.name, job.job_id, job.token, "succeeded", result_json(job.job_id, text))
        for job, text in zip(jobs, texts, strict=True)
    ]
    own_queue.client.config_resetstat()
    assert own_queue.transport.run_many(calls) == ["committed"] * len(jobs)
    assert own_queue.client.info("commandstats")["cmdstat_evalsha"]["calls"] == 3
    found = [own_queue.run(reads.outcome(own_queue.name, job.job_id)).result for job in jobs]
    assert [len(result.text) for result in found if result is not None] == list(map(len, texts))
    assert own_queue.transport.run_many(calls) == ["already_done"] * len(jobs)


def test_a_reply_of_another_shape_is_asked_for_again(
    valkey_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = streaming(valkey_queue, 2)
    send = SyncTransport._send

    def odd(transport: SyncTransport, calls: Sequence[Call[Any]]) -> list[Any]:
        replies = send(transport, calls)
        return [[] if len(call.args) > 5 else reply for call, reply in zip(calls, replies, strict=True)]

    monkeypatch.setattr(SyncTransport, "_send", odd)
    feeds = valkey_queue.transport.run_many([reads.feed(valkey_queue.name, job.job_id, 0, 0) for job in jobs])
    assert [feed.state for feed in feeds] == ["running"] * 2
