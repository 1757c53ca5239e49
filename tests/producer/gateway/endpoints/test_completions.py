"""Chat and text completions as the openai package requests them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from pagemill import Producer
from pagemill.producer.wire.calls import registry
from tests.producer.driving import Queue, open_queue
from tests.producer.gateway.serving import Served, gateway
from tests.worker.harness import PATIENCE_S, eventually

CHAT: list[Any] = [{"role": "user", "content": "hello there"}]


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(limits=limits, timeout=PATIENCE_S) as transport,
        AsyncOpenAI(
            base_url=served.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S, http_client=transport
        ) as client,
    ):
        yield client


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo", messages=CHAT, max_tokens=8, n=2, logprobs=True, top_logprobs=2, seed=5, user="u"
    )
    assert answer.id.startswith("chatcmpl-")
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.content
        assert choice.finish_reason in ("stop", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == 16


def test_an_authors_name_changes_nothing(client: OpenAI) -> None:
    """A field of OpenAI's messages that chat templates do not support."""
    texts = [
        client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "hi", **author}], max_tokens=40
        )
        .choices[0]
        .message.content
        for author in ({}, {"name": "ann"})
    ]
    assert texts[0] == texts[1]


def test_what_is_streamed_is_what_is_answered_whole(client: OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "echo", "messages": CHAT, "max_tokens": 9, "n": 2, "logprobs": True, "seed": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**ask)
    texts, reasons, tokens, roles = ["", ""], {}, [0, 0], [0, 0]
    usage = None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            tokens[choice.index] += len((choice.logprobs and choice.logprobs.content) or ())
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert tokens == [9, 9]
    assert roles == [1, 1]
    assert usage == whole.usage


@pytest.mark.parametrize("asked", [True, False])
def test_usage_in_every_chunk_may_be_asked_for(client: OpenAI, asked: bool) -> None:
    ask: dict[str, Any] = {"model": "echo", "messages": CHAT, "max_tokens": 3, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": asked}
    *others, last = client.chat.completions.create(**ask, stream_options=options)
    assert last.usage is not None
    assert last.usage.completion_tokens == 3
    assert {chunk.usage for chunk in others} == {None}


def test_several_prompts_in_one_request(client: OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "echo",
        "prompt": ["one", "three"],
        "max_tokens": 4,
        "n": 2,
        "logprobs": 1,
    }
    whole = client.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text != whole.choices[2].text
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in whole.choices]


def test_token_ids_as_a_prompt(client: OpenAI) -> None:
    by_ids = client.completions.create(model="echo", prompt=list(b"abc"), max_tokens=3)
    assert (
        by_ids.choices[0].text
        == client.completions.create(model="echo", prompt="abc", max_tokens=3).choices[0].text
    )


def test_a_stop_string_ends_it(client: OpenAI) -> None:
    answer = client.completions.create(model="echo", prompt="hello there", max_tokens=11, stop=" ")
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "stop"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").owned_by == "pagemill"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../echo")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"extra_body": {"tenant": "somebody-else"}}, "tenant"),
        ({"extra_body": {"webhook": "https://example.com"}}, "webhook"),
        ({"extra_body": {"priority": "high"}}, "priority"),
        ({"store": "yes"}, "store"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 10_000}, "n"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ],
)
def test_what_is_not_supported_is_named(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**({"model": "echo", "messages": CHAT} | fields))
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert refused.value.code
    assert refused.value.response.headers["x-request-id"].startswith("req_")


def test_a_job_that_fails_is_an_answer_in_itself(client: OpenAI) -> None:
    """The worker rejects it, not the gateway; before the start of a stream this is a status too."""
    for is_stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="echo", prompt="x" * 400_000, max_tokens=5, stream=is_stream)
        assert refused.value.code in ("context_length_exceeded", "never_fits")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_token_id_outside_the_vocabulary_is_named(client: OpenAI, is_stream: bool) -> None:
    with pytest.raises(
        openai.BadRequestError, match="token id 50256 is not in the model's vocabulary"
    ) as refused:
        client.chat.completions.create(
            model="echo",
            messages=CHAT,
            logit_bias={"50256": -100},
            stream=is_stream,  # type: ignore[call-overload]
        )
    assert refused.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError, match="token id 50256") as refused:
        client.completions.create(model="echo", prompt=[50256])
    assert refused.value.param == "prompt"


def test_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="gpt-9", prompt="x")
    assert refused.value.code == "model_not_found"


@pytest.mark.slow
async def test_two_hundred_streams_at_once(async_client: AsyncOpenAI, served: Served) -> None:
    async def one(number: int) -> str:
        stream = await async_client.completions.create(
            model="echo", prompt=f"stream {number:03d}", max_tokens=10, stream=True
        )
        return "".join([choice.text async for chunk in stream for choice in chunk.choices])

    texts = await asyncio.gather(*(one(number) for number in range(200)))
    assert texts == [f"stream {number:03d}" for number in range(200)]
    assert served.is_alive()
    eventually(lambda: "pagemill_gateway_streams 0.0\n" in served.metrics(), "the end of all streams")


@pytest.mark.slow
async def test_whoever_hangs_up_ends_the_job(
    async_client: AsyncOpenAI, served: Served, valkey_url: str, queue: str
) -> None:
    """Streaming and waiting, early and late: no job continues without a client."""
    long = {"model": "echo", "max_tokens": 4000, "prompt": "x" * 20, "extra_body": {"ignore_eos": True}}

    async def hang_up_streaming(after: int) -> None:
        stream = await async_client.completions.create(**long, stream=True)
        for _ in range(after):
            await anext(aiter(stream))
        await stream.close()

    async def hang_up_waiting(after: float) -> None:
        with pytest.raises((TimeoutError, asyncio.CancelledError)):
            await asyncio.wait_for(async_client.completions.create(**long), after)

    before = cancelled(valkey_url, queue)
    await asyncio.gather(
        *(hang_up_streaming(after) for after in (0, 1, 3) for _ in range(5)),
        *(hang_up_waiting(after) for after in (0.3, 0.6) for _ in range(5)),
    )
    eventually(lambda: running(valkey_url, queue) == 0, "the end of every job")
    assert cancelled(valkey_url, queue) > before
    assert (await async_client.completions.create(model="echo", prompt="on", max_tokens=2)).choices[
        0
    ].text == "on"
    assert served.is_alive()


def running(url: str, queue: str) -> int:
    from pagemill.producer.wire.calls import registry

    client = open_queue(url, queue)
    try:
        counts = registry.stats(client.run, queue).counts
        return counts.get("queued", 0) + counts.get("running", 0)
    finally:
        client.transport.close()


def cancelled(url: str, queue: str) -> int:
    from pagemill.producer.wire.calls import registry

    client = open_queue(url, queue)
    try:
        return registry.stats(client.run, queue).counts.get("cancelled", 0)
    finally:
        client.transport.close()


@pytest.mark.slow
def test_the_deadline_is_a_504(valkey_url: str, queue_name: str) -> None:
    """No worker serves the queue: the operator declared that the model will be available."""
    with (
        gateway(valkey_url, queue_name, models=("later",)) as served,
        OpenAI(base_url=served.base_url, api_key="x", max_retries=0) as client,
    ):
        for is_stream in (False, True):
            with pytest.raises(openai.APIStatusError) as late:
                client.completions.create(
                    model="later", prompt="x", stream=is_stream, extra_headers={"x-request-timeout": "0.5"}
                )
            assert late.value.status_code == 504
            assert late.value.code == "deadline_exceeded"


def test_what_was_estimated_is_in_the_answer(served: Served) -> None:
    body = {"model": "echo", "prompt": "hello", "max_tokens": 4}

    def ask(estimate: str, **more: object) -> httpx.Response:
        headers = {"x-estimate": estimate}
        return httpx.post(
            f"{served.base_url}/completions", json=body | more, headers=headers, timeout=PATIENCE_S
        )

    eventually(lambda: "x-estimated-p50" in ask("flag").headers, "the worker's speed")
    for more in ({}, {"stream": True}):
        answer = ask("refuse", **more)
        assert answer.status_code == 200
        assert float(answer.headers["x-estimated-p50"]) <= float(answer.headers["x-estimated-p90"])
    wrong = ask("maybe")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_estimate")
    assert "x-estimated-p50" not in httpx.post(f"{served.base_url}/completions", json=body).headers


def test_a_deadline_that_would_be_missed_is_refused_at_once(valkey_queue: Queue) -> None:
    speed = registry.Speed(rows=1, busy_rate=0.01, free_rate=0.01)
    valkey_queue.run(
        registry.heartbeat(valkey_queue.name, registry.WorkerInfo(id="w", models=("m",), speed=speed))
    )
    with gateway(valkey_queue.url, valkey_queue.name, models=("m",)) as served:
        refused = httpx.post(
            f"{served.base_url}/completions",
            json={"model": "m", "prompt": "x"},
            headers={"x-estimate": "refuse"},
        )
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "deadline_unreachable")
    assert int(refused.headers["retry-after"]) > 0
    assert valkey_queue.client.hget(f"{valkey_queue.prefix}counts", "queued") is None


def test_a_full_queue_is_a_429_and_no_worker_a_503(valkey_queue: Queue) -> None:
    from pagemill.producer.wire.calls.limits import QueueLimits, set_limits

    valkey_queue.run(set_limits(valkey_queue.name, QueueLimits(jobs=1)))
    valkey_queue.submit("only")
    with gateway(valkey_queue.url, valkey_queue.name, models=("m",)) as served:
        full = httpx.post(f"{served.base_url}/completions", json={"model": "m", "prompt": "x"})
        assert full.status_code == 429
        assert full.json()["error"]["code"] == "queue_full"
        assert full.headers["retry-after"]
        nobody = httpx.post(f"{served.base_url}/completions", json={"model": "other", "prompt": "x"})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "no_worker")


def test_an_idempotency_key_finds_the_job_again(served: Served, valkey_url: str, queue: str) -> None:
    ask = {"model": "echo", "prompt": "again", "max_tokens": 3}
    first, second = (
        httpx.post(f"{served.base_url}/completions", json=ask, headers={"idempotency-key": "k1"}).json()
        for _ in range(2)
    )
    assert first["id"] == second["id"]
    other = httpx.post(
        f"{served.base_url}/completions", json=ask | {"prompt": "else"}, headers={"idempotency-key": "k1"}
    )
    assert other.status_code == 409
    with Producer(valkey_url, queue=queue) as producer:
        assert producer.job(first["id"].removeprefix("cmpl-")).status().state == "succeeded"


def test_a_schema_shapes_the_answer(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="echo",
        messages=CHAT,
        max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["yes"]}}},
    )
    assert json.loads(answer.choices[0].message.content or "") == "yes"


def test_log_probabilities_have_their_tokens_texts(client: OpenAI) -> None:
    answer = client.completions.create(
        model="echo", prompt="a\u00fc!", max_tokens=8, logprobs=2, extra_body={"ignore_eos": False}
    ).choices[0]
    assert answer.text == "a\u00fc!"
    assert answer.logprobs is not None
    assert answer.logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xbc", "!", "<end>"]
    assert answer.logprobs.text_offset == [0, 1, 1, 2, 3]
    for token, top in zip(answer.logprobs.tokens, answer.logprobs.top_logprobs or (), strict=True):
        assert len(top) == 2
        assert top[token] == max(top.values())
    chat = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "\u00fc"}], max_tokens=2, logprobs=True
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content or []
    assert b"".join(bytes(token.bytes or ()) for token in content) == "\u00fc".encode()


def test_so_have_those_of_a_stream(client: OpenAI) -> None:
    chunks = list(
        client.completions.create(model="echo", prompt="a\u00fc!", max_tokens=8, logprobs=1, stream=True)
    )
    logprobs = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert [token for one in logprobs for token in one.tokens or ()] == [
        "a", "bytes:\\xc3", "bytes:\\xbc", "!", "<end>",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_prompt_is_scored_by_its_echo(client: OpenAI) -> None:
    answer = client.completions.create(
        model="echo", prompt=["abc", "\u00fc!"], echo=True, max_tokens=0, logprobs=1, temperature=0.0, seed=1
    )
    first, second = answer.choices
    assert (first.text, second.text) == ("abc", "\u00fc!")
    assert first.finish_reason == "length"
    assert first.logprobs is not None
    assert first.logprobs.tokens == ["a", "b", "c"]
    assert first.logprobs.token_logprobs == [None, pytest.approx(-0.01), pytest.approx(-0.01)]
    assert first.logprobs.text_offset == [0, 1, 2]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 0)
    with pytest.raises(openai.BadRequestError, match="echo with output can't be streamed"):
        client.completions.create(model="echo", prompt="abc", echo=True, max_tokens=1, stream=True)
