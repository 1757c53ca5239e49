"""Streams to readers that connect early, late, several together, or never read; and very many waiting handles."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from pagemill import AsyncProducer, JobCancelled, Producer
from pagemill.producer.client.aio import MAX_CONNECTIONS
from pagemill.producer.client.preparer import item_id
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import StreamEvent
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow

TEXT = "0123456789" * 30
WAITING = 10_000


def replayed(events: list[StreamEvent], samples: int = 1) -> list[str]:
    """A reader's final texts; its tokens must be consecutive, without gap or overlap."""
    texts, lengths = [""] * samples, [0] * samples
    for event in events[:-1]:
        if event.type == "snapshot":
            texts[event.index], lengths[event.index] = event.text, len(event.token_ids)
        else:
            assert event.offset == lengths[event.index]
            texts[event.index] += event.text
            lengths[event.index] += len(event.token_ids)
    assert [event.type for event in events].count("end") == 1
    assert (events[-1].type, events[-1].state) == ("end", "succeeded")
    return texts


def test_readers_that_come_early_late_and_too_late_read_the_same(client: QueueClient) -> None:
    with (
        running_worker(worker_config(client.url, client.queue, model="echo:3")),
        Producer(client.url, queue=client.queue) as producer,
    ):
        handle = producer.submit(prompt=TEXT, model="echo", max_tokens=len(TEXT), n=2, stream=True)
        read: list[list[StreamEvent]] = [[] for _ in range(5)]
        started = threading.Barrier(3)

        def reader(index: int) -> None:
            started.wait()
            with Producer(client.url, queue=client.queue) as other:
                read[index] += other.job(handle.id).stream()

        threads = [threading.Thread(target=reader, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        idle = handle.stream()  # requests one event and never again: it costs the server nothing
        next(idle)
        eventually(lambda: client.generated(handle.id) > 200, "most of the output")
        read[3] += handle.stream()
        assert read[3][0].type == "snapshot", "who comes late gets what there is in one piece"
        for thread in threads:
            thread.join(60)
        read[4] += handle.stream()
        for events in read:
            assert replayed(events, samples=2) == [TEXT, TEXT]
        assert len(read[0]) > 5, "the first reader saw it grow"
        assert client.redis.exists(keys.checkpoint(client.queue, handle.id)) == 0, (
            "the feed is gone with the end"
        )
        idle.close()  # type: ignore[attr-defined]


def test_what_a_stream_costs_the_server_is_its_output_and_no_more(client: QueueClient) -> None:
    with (
        running_worker(worker_config(client.url, client.queue, model="echo:3")),
        Producer(client.url, queue=client.queue) as producer,
    ):
        handle = producer.submit(prompt=TEXT, model="echo", max_tokens=len(TEXT), stream=True)
        feed = keys.checkpoint(client.queue, handle.id)
        before = client.redis.dbsize()
        most = 0
        for index, _ in enumerate(handle.stream()):
            most = max(most, client.redis.llen(feed))
            if index == 3:
                assert client.redis.dbsize() <= before + 2, "a reader leaves no key of its own"
        assert 3 < most <= len(TEXT)


async def test_ten_thousand_handles_wait_on_a_few_connections(client: QueueClient) -> None:
    async with AsyncProducer(client.url, queue=client.queue) as producer:
        batch = await producer.submit_many(
            ({"prompt": "p", "model": "m", "key": str(index)} for index in range(WAITING)), batch_id="b"
        )
        handles = [producer.job(item_id("b", str(index))) for index in range(WAITING)]
        connections = int(client.redis.info("clients")["connected_clients"])
        ends = [asyncio.ensure_future(handle.result(timeout=120)) for handle in handles]
        give_up = time.monotonic() + 60
        while await _calls_per_second(client) > WAITING / 100:  # until each has sent one request, and waits
            assert time.monotonic() < give_up, "each handle polls for itself"
        assert int(client.redis.info("clients")["connected_clients"]) - connections <= MAX_CONNECTIONS + 2
        assert not any(end.done() for end in ends)
        assert await batch.cancel() == WAITING
        told = await asyncio.gather(*ends, return_exceptions=True)
        assert all(isinstance(end, JobCancelled) for end in told)


async def _calls_per_second(client: QueueClient) -> float:
    calls, began = _calls(client), time.monotonic()
    await asyncio.sleep(1)
    return (_calls(client) - calls) / (time.monotonic() - began)


def _calls(client: QueueClient) -> int:
    return int(client.redis.info("commandstats")["cmdstat_evalsha"]["calls"])
