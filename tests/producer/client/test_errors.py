"""Errors name the cause and the remedy: in their text, and in attributes."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill import AsyncProducer, InvalidJob, Job, Producer, QueueFull, ResultTimeout, SamplingParams
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.limits import QueueLimits, set_limits
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.producer.driving import Queue

JOB = {"prompt": "p", "model": "nope"}


def test_a_model_that_nobody_serves_is_what_a_timeout_says(queue: Queue, producer: Producer) -> None:
    handle = producer.submit(JOB)
    with pytest.raises(
        ResultTimeout, match=r"no live worker serves it \(model nope\); queue .* has none"
    ) as late:
        handle.result(timeout=0.01)
    assert "no live worker serves it (model nope)" in (late.value.reason or "")
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w", models=("b", "a")), ttl_ms=300_000))
    with pytest.raises(
        ResultTimeout, match=r"no live worker serves it \(model nope\); those alive serve a, b"
    ):
        handle.result(timeout=0.01)


def test_a_served_job_that_is_late_has_no_such_reason(queue: Queue, producer: Producer) -> None:
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w", models=("nope",)), ttl_ms=300_000))
    with pytest.raises(ResultTimeout, match=r"is queued after 0\.01 s; it continues") as late:
        producer.submit(JOB).result(timeout=0.01)
    assert late.value.reason is None


async def test_asyncio_says_the_same(aio: AsyncProducer) -> None:
    handle = await aio.submit(JOB)
    with pytest.raises(ResultTimeout, match="no live worker serves it"):
        await handle.result(timeout=0.01)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            "hello",
            'messages: a chat is a list of messages like {"role": "user", "content": "..."}; a single text',
        ),
        (["hello"], "messages.0: a chat is a list of messages like"),
        ({"role": "user", "content": "hello"}, "messages: a chat is a list of messages like"),
    ],
)
def test_a_chat_of_another_shape_is_told_the_right_one(messages: Any, says: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        Job.parse({"model": "m", "messages": messages})
    assert says in str(refused.value)
    assert "tuple" not in str(refused.value)


def test_a_list_is_called_a_list() -> None:
    with pytest.raises(InvalidJob, match="stop_token_ids: should be a list"):
        Job.parse({"model": "m", "prompt": "p", "stop_token_ids": 5})


def test_a_full_queue_tells_its_figures(queue: Queue, producer: Producer) -> None:
    queue.run(set_limits(queue.name, QueueLimits(jobs=2)))
    producer.submit(JOB)
    producer.submit(JOB, delay=60.0)
    for submit in (lambda: producer.submit(JOB, priority="high"), lambda: many(producer)):
        with pytest.raises(QueueFull, match="2 wait, the limit is 2") as full:
            submit()
        error = full.value
        assert (error.queue, error.limit, error.depth) == (queue.name, 2, 2)
        assert error.lane == ("high", "default", "nope")


def many(producer: Producer) -> None:
    producer.submit_many([{**JOB, "priority": "high"}], on_full="raise")


async def test_so_it_does_on_asyncio(queue: Queue, aio: AsyncProducer) -> None:
    queue.run(set_limits(queue.name, QueueLimits(jobs=1)))
    await aio.submit(JOB)
    with pytest.raises(QueueFull) as full:
        await aio.submit(JOB)
    assert (full.value.limit, full.value.depth) == (1, 1)


def test_a_batch_that_takes_too_long_delivers_what_it_has(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many([{**JOB, "key": name} for name in "abc"])
    (first,) = queue.pull(1, models=("nope",))
    queue.commit(first, "done")
    found: list[str] = []
    with pytest.raises(ResultTimeout, match=f"1 of 3 jobs of batch {batch.id} have ended after 0.05 s"):
        found.extend(item.key for item in batch.results(timeout=0.05))
    assert found == ["a"]
    for job in queue.pull(2, models=("nope",)):
        queue.commit(job)
    assert len(list(batch.results(timeout=0.0))) == 3
    assert len(list(batch.results(timeout=60.0, ordered=True))) == 3


async def test_so_it_is_on_asyncio(aio: AsyncProducer) -> None:
    batch = await aio.submit_many([JOB])
    with pytest.raises(ResultTimeout, match="0 of 1 jobs"):
        async for _ in batch.results(timeout=0.01):
            pass


def test_sampling_params_take_a_mapping() -> None:
    shape = SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs  # type: ignore[arg-type]
    assert shape is not None
    assert shape.choice == ("a", "b")
