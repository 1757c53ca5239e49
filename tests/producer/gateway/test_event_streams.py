"""A response of server-sent events: its comments, and its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, Literal

import pytest
from starlette.types import Message, Scope

from pagemill import AsyncProducer
from pagemill.producer.client.aio_handles import AsyncJobHandle
from pagemill.producer.gateway.guard.limits import ClientGone
from pagemill.producer.gateway.request_parsing import ParsedRequest
from pagemill.producer.gateway.streaming import CompletionStream, EventStream
from pagemill.producer.openai.formats import CHAT_URL, COMPLETIONS_URL, is_chat, logprobs_body
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import PositionLogprobs, StreamEvent, TokenLogprob

Take = Callable[[bytes], None]


class Client:
    """Reads a response, and disconnects when the test says so."""

    def __init__(self, take: Take = lambda body: None) -> None:
        self.taken: list[bytes] = []
        self.leaves = asyncio.Event()
        self.closed = 0
        self._take = take

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self._take(message["body"])
            self.taken.append(message["body"])

    def _close(self) -> None:
        self.closed += 1

    async def ask(self, rest: AsyncGenerator[bytes, None], ping_s: float = 60.0) -> None:
        scope: Scope = {"type": "http"}
        stream = EventStream(b"first", rest, ping_s, self._close)
        try:
            await stream(scope, self.receive, self.send)
        finally:
            assert self.closed == 1
            with pytest.raises(StopAsyncIteration):
                await anext(rest)


async def pausing(chunks: list[bytes], pause_s: float) -> AsyncGenerator[bytes, None]:
    for chunk in chunks:
        await asyncio.sleep(pause_s)
        yield chunk


async def test_comments_fill_pauses_alone() -> None:
    client = Client()
    await client.ask(pausing([b"a", b"b"], 0.3), ping_s=0.1)
    assert [body for body in client.taken if not body.startswith(b":")] == [b"first", b"a", b"b", b""]
    assert sum(body.startswith(b":") for body in client.taken) >= 2
    busy = Client()
    await busy.ask(pausing([b"c"] * 20, 0.01), ping_s=5.0)
    assert busy.taken == [b"first", *[b"c"] * 20, b""]


async def test_a_client_that_hangs_up_ends_it() -> None:
    client = Client()
    asyncio.get_running_loop().call_later(0.1, client.leaves.set)
    async with asyncio.timeout(30):
        await client.ask(pausing([b"never"], 3600.0))
    assert client.taken == [b"first"]


async def test_a_client_that_takes_no_comment_is_gone() -> None:
    def refuse(body: bytes) -> None:
        if body.startswith(b":"):
            raise ClientGone

    client = Client(refuse)
    with pytest.raises(ClientGone):
        await client.ask(pausing([b"never"], 3600.0), ping_s=0.05)


async def test_the_gateway_s_end_is_told() -> None:
    client = Client()
    answer: asyncio.Task[Any] = asyncio.create_task(client.ask(pausing([b"never"], 3600.0)))
    while not client.taken:
        await asyncio.sleep(0.01)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert b'"code":"stopping"' in client.taken[-1]


POSITION = PositionLogprobs(chosen=TokenLogprob(token_id=5, logprob=-0.5, text="a"))
TEXT = 'a "quoted"\n\u2028 wörd 😀'


def asked(url: str, *, include_usage: bool) -> ParsedRequest:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat(url) else {"prompt": "x"}
    return ParsedRequest(url, (Job.parse({"model": "org/m@1", "n": 2, **prompt}),), True, include_usage, 60.0)


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("url", [CHAT_URL, COMPLETIONS_URL])
async def test_a_chunk_is_the_json_of_the_whole_object(url: str, include_usage: bool) -> None:
    """Byte for byte, though the common part of all chunks of a stream is written once."""
    async with AsyncProducer("redis://127.0.0.1:1", queue="q") as producer:
        handles = [AsyncJobHandle(producer, name) for name in ("one", "two")]
        stream = CompletionStream(asked(url, include_usage=include_usage), handles)
        token = StreamEvent(type="token", index=1, token_ids=(5,), text=TEXT, logprobs=(POSITION,))
        chunks = await stream._chunks_of(1, token)
        assert len(chunks) == (2 if is_chat(url) else 1)
        chunks += [chunk for chunk in stream._closing() if b"DONE" not in chunk]
    names = ["id", "object", "created", "model", "choices", *(["usage"] if include_usage else [])]
    for chunk in chunks:
        body = json.loads(chunk.removeprefix(b"data: "))
        assert chunk == b"data: %b\n\n" % json.dumps(body, separators=(",", ":")).encode()
        assert list(body) == names
        assert body["id"] == ("chatcmpl-one" if is_chat(url) else "cmpl-one")
    (choice,) = json.loads(chunks[1 if is_chat(url) else 0].removeprefix(b"data: "))["choices"]
    assert (choice["index"], choice["finish_reason"]) == (3, None)
    assert (choice["delta"]["content"] if is_chat(url) else choice["text"]) == TEXT
    assert choice["logprobs"] is not None


LONG = ["a", " b", *(f"bytes:\\x{byte:02x}" for byte in "\u4f60\U0001f600".encode())] * 60


@pytest.mark.parametrize("url", [CHAT_URL, COMPLETIONS_URL])
@pytest.mark.parametrize("kind", ["token", "snapshot"])
async def test_many_log_probabilities_are_sent_in_parts(
    url: str, kind: Literal["token", "snapshot"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they equal one chunk: the gateway's other requests run between the parts."""
    positions = tuple(
        PositionLogprobs(chosen=TokenLogprob(token_id=number, logprob=-number / 8, text=text))
        for number, text in enumerate(LONG)
    )
    events = [
        StreamEvent(
            type=kind, token_ids=tuple(range(540)), text="a b\u4f60\U0001f600" * 60, logprobs=positions
        ),
        StreamEvent(type="token", offset=540, token_ids=(0,), text="a", logprobs=positions[:1]),
    ]
    turns = 0

    async def turning() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def told(stream: CompletionStream) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        for event in events:
            yield 0, event

    monkeypatch.setattr(CompletionStream, "_events", told)
    beside = asyncio.create_task(turning())
    async with AsyncProducer("redis://127.0.0.1:1", queue="q") as producer:
        stream = CompletionStream(asked(url, include_usage=False), [AsyncJobHandle(producer, "one")])
        chunks = [chunk async for chunk in stream.chunks()]
    beside.cancel()
    assert turns >= 6
    bodies = [
        json.loads(chunk.removeprefix(b"data: "))["choices"][0] for chunk in chunks if b"DONE" not in chunk
    ]
    text = "".join(body["delta"].get("content", "") if is_chat(url) else body["text"] for body in bodies)
    assert text == events[0].text + "a"
    found = [body["logprobs"] for body in bodies if body["logprobs"]]
    whole = logprobs_body(url, positions + positions[:1])
    assert whole is not None
    for name, values in whole.items():
        if values is not None:
            parts = [part[name] for part in found]
            assert [value for part in parts for value in part] == values
            assert max(map(len, parts)) <= 80
