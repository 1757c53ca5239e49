"""AsyncProducer: the same flows on an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pagemill import AsyncProducer, IdempotencyConflict, JobCancelled, JobNotFound, Producer, ResultTimeout
from pagemill.producer.wire.calls import reads
from pagemill.producer.wire.schema.errors import RedisRefused
from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.server.transport import AsyncTransport
from tests.producer.driving import Queue, delta
from tests.producer.scripted_worker import scripted_worker


@pytest.fixture
async def producer(queue: Queue) -> AsyncIterator[AsyncProducer]:
    async with AsyncProducer(queue.url, queue=queue.name) as producer:
        yield producer


@pytest.mark.slow
async def test_a_thousand_waits_share_one_listener(queue: Queue, producer: AsyncProducer) -> None:
    handles = [await producer.submit(prompt=f"p{i}", model="m") for i in range(1000)]
    waits = [asyncio.create_task(handle.result(timeout=120)) for handle in handles]
    with scripted_worker(queue.url, queue.name):
        results = await asyncio.gather(*waits)
    assert [result.text for result in results] == [f"p{i}" for i in range(1000)]
    assert len(queue.client.client_list()) < 60


async def test_a_batch(queue: Queue, producer: AsyncProducer) -> None:
    batch = await producer.submit_many({"prompt": f"p{i}", "model": "m"} for i in range(300))
    with scripted_worker(queue.url, queue.name):
        texts = {item.result.text async for item in batch.results() if item.result}
    assert texts == {f"p{i}" for i in range(300)}
    assert (await batch.wait(timeout=1)).succeeded == 300
    assert await batch.ack("e100") == 100
    assert await batch.cancel() == 0
    assert [item.result.text async for item in batch.results(ordered=True) if item.result]
    assert (await batch.counts()).total == 300


async def test_a_key_with_other_work_is_a_conflict(producer: AsyncProducer) -> None:
    jobs = [{"prompt": text, "model": "m", "key": "a"} for text in "pq"]
    assert (await (await producer.submit_many(jobs)).counts()).failed == 1
    with pytest.raises(IdempotencyConflict):
        await producer.submit_many(jobs, on_invalid="raise")


async def test_a_loop_beside_the_producer_s_own_is_refused(producer: AsyncProducer) -> None:
    handle = await producer.submit(prompt="p", model="m")
    for call in (handle.status, handle.result, producer.close, producer.batches().__anext__):
        with pytest.raises(RuntimeError, match="one AsyncProducer per event loop"):
            await asyncio.to_thread(asyncio.run, call())
    assert (await handle.status()).state == "queued"


def test_loops_one_after_the_other_may_share_a_producer(queue: Queue) -> None:
    # In a separate process: asyncio warns about the sockets of a loop that was closed without them.
    code = """
import asyncio, sys
from pagemill import AsyncProducer, ResultTimeout

producer = AsyncProducer(sys.argv[1], queue=sys.argv[2])
handle = asyncio.run(producer.submit(prompt="p", model="m"))
for _ in range(2):
    try:
        asyncio.run(handle.result(timeout=0.01))
    except ResultTimeout:
        print(asyncio.run(handle.status()).state)
asyncio.run(producer.close())
asyncio.run(producer.close())
"""
    command = [sys.executable, "-c", code, queue.url, queue.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.split(), done.stderr) == (["queued", "queued"], "")


async def test_errors_are_the_same(producer: AsyncProducer) -> None:
    handle = await producer.submit(prompt="p", model="m")
    with pytest.raises(ResultTimeout):
        await handle.result(timeout=0.02)
    assert (await handle.progress()).phase == "waiting"
    assert [status.state for status in await producer.statuses([handle.id])] == ["queued"]
    assert await handle.cancel() is True
    with pytest.raises(JobCancelled):
        await handle.result()
    with pytest.raises(JobNotFound):
        await producer.job("none").status()
    with pytest.raises(JobNotFound):
        await producer.batch("none").counts()


async def test_a_stream(queue: Queue, producer: AsyncProducer) -> None:
    handle = await producer.submit(prompt="p", model="m", stream=True)
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, text="o"))
    events = []
    async for event in handle.stream():
        events.append(event)
        if len(events) == 1:
            queue.commit(job, "ok")
    assert "".join(event.text for event in events) == "ok"
    assert events[-1].type == "end"


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 8, 100])
async def test_a_cancelled_wait_leaves_the_others_alone(steps: int, valkey_queue: Queue) -> None:
    """At every point of the cancellation: before the request, during it, and during the wait."""
    async with AsyncProducer(valkey_queue.url, queue=valkey_queue.name) as producer:
        handle = await producer.submit(prompt="p", model="m")
        given_up, patient = (asyncio.create_task(handle.result()) for _ in range(2))
        for _ in range(steps):
            await asyncio.sleep(0)
        given_up.cancel()
        with scripted_worker(valkey_queue.url, valkey_queue.name):
            assert (await patient).text == "p"
            with pytest.raises(asyncio.CancelledError):
                await given_up


async def test_a_cancelled_task_can_still_clean_up(queue: Queue, producer: AsyncProducer) -> None:
    handle = await producer.submit(prompt="p", model="m")

    async def wait() -> None:
        try:
            await handle.result()
        except asyncio.CancelledError:
            assert await handle.cancel()
            raise

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await handle.status()).state == "cancelled"


def test_both_producers_have_the_same_methods() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Producer) == public(AsyncProducer)


async def test_a_token_costs_one_read(
    queue: Queue, producer: AsyncProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts: Counter[str] = Counter()
    run = AsyncTransport.run

    async def counted(transport: AsyncTransport, call: Call[Any]) -> Any:
        scripts[call.script] += 1
        return await run(transport, call)

    monkeypatch.setattr(AsyncTransport, "run", counted)
    handle = await producer.submit(prompt="p", model="m", stream=True)
    job = queue.pull_one()
    events = aiter(handle.stream())
    for number in range(100):
        queue.checkpoint(job, delta(number, number, text="word "))
        event = await anext(events)
        assert event.text == "word "
    queue.commit(job, "word " * 100)
    assert [event.type async for event in events][-1] == "end"
    assert scripts["feed"] < 150, "one for each, and polls"


async def test_calls_made_at_once_are_sent_together(
    queue: Queue, producer: AsyncProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    send = AsyncTransport._send

    async def counted(transport: AsyncTransport, calls: Sequence[Call[Any]]) -> list[Any]:
        sizes.append(len(calls))
        return await send(transport, calls)

    monkeypatch.setattr(AsyncTransport, "_send", counted)
    queue.submit("a")
    await producer.submit(prompt="p", model="m")
    transport = producer._connected().transport
    broken: Call[bool] = Call("feed", (queue.prefix,), ("a",), bool)
    calls: list[Call[Any]] = [
        broken if number == 7 else reads.ends(queue.name, ["a", "none"]) for number in range(50)
    ]
    replies = await asyncio.gather(*map(transport.run, calls), return_exceptions=True)
    assert isinstance(replies.pop(7), RedisRefused)
    assert replies == [[False, True]] * 49
    assert sizes == [50]
