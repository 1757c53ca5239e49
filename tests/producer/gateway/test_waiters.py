"""Repeated requests: a client that disconnects ends a job only if no other client waits for it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from pagemill import Producer
from tests.producer.driving import Queue, open_queue
from tests.producer.gateway.serving import Served, gateway, gateway_process
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config

TEXT = "y" * 30
ASK: dict[str, Any] = {"model": "echo", "prompt": TEXT, "max_tokens": 30}
"""More than half a second's work for the worker below."""
LONG: dict[str, Any] = {"model": "echo", "prompt": "x" * 2000, "max_tokens": 2000}
"""Forty seconds' work."""


@pytest.fixture(scope="module")
def two(valkey_url: str) -> Iterator[tuple[Served, Served, Queue]]:
    """Two gateways, and a worker that takes 20 ms per token."""
    name = f"waiters-{time.time_ns()}"
    queue = open_queue(valkey_url, name)
    config = worker_config(valkey_url, name, model="echo:20", max_num_seqs=64)
    with (
        running_worker(config),
        gateway(valkey_url, name, models=("echo",)) as one,
        gateway(valkey_url, name, models=("echo",)) as other,
    ):
        eventually(lambda: post(one, {"model": "echo", "prompt": "x"}).status_code == 200, "the worker")
        yield one, other, queue
    queue.transport.close()


def post(served: Served, body: dict[str, Any], key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    return httpx.post(f"{served.base_url}/completions", json=body, headers=headers, timeout=PATIENCE_S)


Ask = Callable[[Served, dict[str, Any], str], Awaitable[str]]


async def whole(served: Served, body: dict[str, Any], key: str) -> str:
    """The text of all choices."""
    async with AsyncOpenAI(
        base_url=served.base_url, api_key="x", max_retries=0, timeout=PATIENCE_S
    ) as client:
        answer = await client.completions.create(**body, extra_headers={"idempotency-key": key})
        return "".join(choice.text for choice in answer.choices)


async def streamed(served: Served, body: dict[str, Any], key: str) -> str:
    async with AsyncOpenAI(
        base_url=served.base_url, api_key="x", max_retries=0, timeout=PATIENCE_S
    ) as client:
        stream = await client.completions.create(**body, stream=True, extra_headers={"idempotency-key": key})
        texts: dict[int, str] = {}
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
        return "".join(texts[index] for index in sorted(texts))


async def give_up(asking: Awaitable[str], after_s: float) -> None:
    with pytest.raises((TimeoutError, asyncio.CancelledError)):
        await asyncio.wait_for(asking, after_s)


def states(queue: Queue) -> list[str]:
    ids = [name[4:] for name in queue.names() if name.startswith("job:")]
    return [queue.state(job_id) for job_id in ids]


def waiting(queue: Queue) -> int:
    """The counted waiters of all jobs in progress."""
    ids = [name[4:] for name in queue.names() if name.startswith("job:")]
    counted = [
        queue.client.hget(f"{queue.prefix}job:{job_id}", "waiters")
        for job_id in ids
        if queue.state(job_id) in ("queued", "running")
    ]
    return sum(len((found or b"").split()) for found in counted)


async def joined(queue: Queue, asking: Awaitable[str], jobs: int = 1) -> asyncio.Future[str]:
    """The request, once it is counted."""
    before = waiting(queue)
    task = asyncio.ensure_future(asking)
    await asyncio.to_thread(eventually, lambda: waiting(queue) == before + jobs, "the request to be counted")
    return task


async def hang_up(asking: asyncio.Future[str]) -> None:
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


def active(queue: Queue) -> int:
    return sum(state in ("queued", "running") for state in states(queue))


@pytest.mark.slow
@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.1])
async def test_a_retry_after_a_time_out_is_answered(
    two: tuple[Served, Served, Queue], ask: Ask, pause_s: float
) -> None:
    """Before the gateway has noticed the disconnect, while the worker is being notified, and after."""

    async def once(number: int) -> str:
        key = f"retry-{ask.__name__}-{pause_s}-{number}"
        await give_up(ask(two[0], ASK, key), 0.3)
        await asyncio.sleep(pause_s)
        return await ask(two[number % 2], ASK, key)

    assert await asyncio.gather(*map(once, range(10))) == [TEXT] * 10


@pytest.mark.slow
@pytest.mark.parametrize("ask", [whole, streamed])
async def test_who_gives_up_does_not_end_the_job_under_another(
    two: tuple[Served, Served, Queue], ask: Ask
) -> None:
    """On one gateway, and on two; the job runs once."""
    one, other, queue = two
    for number, second in enumerate((one, other)):
        before = len(states(queue))
        key = f"both-{ask.__name__}-{number}"
        asking = [
            await joined(queue, ask(served, ASK | {"prompt": "z" * 120, "max_tokens": 120}, key))
            for served in (one, second)
        ]
        await hang_up(asking[0])
        assert await asking[1] == "z" * 120
        assert len(states(queue)) == before + 1


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_the_last_to_give_up_ends_the_jobs_of_all_prompts(
    two: tuple[Served, Served, Queue], ask: Ask
) -> None:
    one, other, queue = two
    body = LONG | {"prompt": [f"{number}" * 2000 for number in range(3)]}
    key = f"several-{ask.__name__}"
    ended = states(queue).count("cancelled")
    asking = [await joined(queue, ask(served, body, key), 3) for served in (one, other)]
    await hang_up(asking[0])
    await asyncio.to_thread(eventually, lambda: waiting(queue) == 3, "the hang-up to be seen")
    assert active(queue) == 3
    await hang_up(asking[1])
    await asyncio.to_thread(eventually, lambda: active(queue) == 0, "the end of the jobs")
    assert states(queue).count("cancelled") == ended + 3


@pytest.mark.slow
async def test_a_retry_of_several_prompts_is_answered(two: tuple[Served, Served, Queue]) -> None:
    body = ASK | {"prompt": ["a" * 30, "b" * 30, "c" * 30]}
    for number in range(3):
        await give_up(whole(two[0], body, f"list-{number}"), 0.3)
        assert await whole(two[1], body, f"list-{number}") == "".join(body["prompt"])


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_producers_job_outlives_a_client_of_the_gateway(
    two: tuple[Served, Served, Queue], is_first: bool
) -> None:
    """In either order: a producer that has submitted may request the result at any time."""
    one, _, queue = two
    key = f"producer-{is_first}"
    with Producer(queue.url, queue=queue.name) as producer:

        def submit() -> str:
            return producer.submit(model="echo", prompt=TEXT * 4, max_tokens=120, idempotency_key=key).id

        job_id = submit() if is_first else ""
        asking = asyncio.create_task(whole(one, ASK | {"prompt": TEXT * 4, "max_tokens": 120}, key))
        await asyncio.to_thread(eventually, lambda: active(queue) == 1, "the job")
        await asyncio.sleep(0.5)
        if not is_first:
            job_id = submit()
        await hang_up(asking)
        result = await asyncio.to_thread(producer.job(job_id).result, PATIENCE_S)
        assert result.text == TEXT * 4


@pytest.mark.slow
def test_a_gateway_that_is_killed_leaves_its_job_running(two: tuple[Served, Served, Queue]) -> None:
    _, other, queue = two
    body = b'{"model": "echo", "prompt": "%b", "max_tokens": 30}' % TEXT.encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"idempotency-key: killed\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with (
        gateway_process(queue.url, queue.name, models=("echo",)) as (served, process),
        served.connect() as connection,
    ):
        connection.sendall(head.encode() + body)
        eventually(lambda: active(queue) == 1, "its job")
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
    before = len(states(queue))
    assert post(other, ASK, "killed").json()["choices"][0]["text"] == TEXT
    assert len(states(queue)) == before, "the retry found the job"
