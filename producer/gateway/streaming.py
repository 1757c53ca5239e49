"""Responses as server-sent events: a job's stream as OpenAI's chunks.

Sent text cannot be retracted. When a job restarts after a retry, nothing is sent until it has new text; if its text
differs from what was sent, the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemill.producer.client.aio_handles import AsyncJobHandle
from pagemill.producer.gateway.errors import ApiError, as_api_error, stopping
from pagemill.producer.gateway.request_parsing import ParsedRequest
from pagemill.producer.openai.formats import (
    completion_id,
    finish_reason,
    is_chat,
    is_part_of_character,
    joined_text,
    logprobs_body,
    reasoning_body,
    total_usage,
    usage_body,
)
from pagemill.producer.wire.schema.errors import PagemillError, ResultTimeout
from pagemill.producer.wire.schema.outputs import Output, PositionLogprobs, Result, StreamEvent, Usage
from pagemill.producer.wire.schema.text.chat import ToolCallDelta

GRACE_S = 5.0
"""Margin after the deadline, in case the queue itself does not end the job."""
END_PATIENCE_S = 10.0
"""Timeout for the result, which normally exists once the stream has ended."""
_DONE = b"data: [DONE]\n\n"
_PING = b": waiting\n\n"
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_MAX_POSITIONS = 64
"""Maximum log-probabilities in one chunk: formatting thousands would block the event loop."""
_MERGED_EVENTS = 64
"""Events of several jobs buffered for a slow client; the rest stays in Redis."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one sample: its `content`, its `reasoning`, or the arguments of a call, identified by its number."""

    part: str | int
    text: str
    call: ToolCallDelta | None = None
    """A call's first delta, with id and name."""


@dataclass(slots=True)
class _Sample:
    """The sent text of one sample, by parts, and the text that its job has generated in this run."""

    sent: dict[str | int, str] = field(default_factory=dict)
    sent_positions: int = 0
    sent_characters: int = 0
    """Length of the text at the end of the last sent positions."""
    seen: dict[str | int, str] = field(default_factory=dict)
    calls: dict[int, ToolCallDelta] = field(default_factory=dict)
    last: str | int | None = None
    """The part that was sent last."""
    has_begun: bool = False

    def check_end(self) -> None:
        """Raise ApiError if the job has ended before it reached the sent text."""
        if self.seen != self.sent:
            raise diverged()

    def take(self, event: StreamEvent) -> tuple[list[TextDelta], tuple[PositionLogprobs, ...] | None]:
        """Return the text and logprobs to send now. Raises ApiError if the text contradicts `sent`."""
        if event.type == "snapshot":
            self.seen = {}
        begun = self._see(event)
        if any(
            not self.seen.get(part, "").startswith(sent) and not sent.startswith(self.seen.get(part, ""))
            for part, sent in self.sent.items()
        ):
            raise diverged()
        if any(len(self.seen.get(part, "")) < len(sent) for part, sent in self.sent.items()):
            return [], None
        news = [
            TextDelta(part, text[len(self.sent.get(part, "")) :], begun.get(part))
            for part, text in self.seen.items()
            if part in begun or len(text) > len(self.sent.get(part, ""))
        ]
        # An event can end one part and start others.
        news.sort(key=lambda one: one.part != self.last)
        self.last = news[-1].part if news else self.last
        self.sent = dict(self.seen)
        if event.logprobs is None:
            return news, None
        positions = event.logprobs[max(0, self.sent_positions - event.offset) :]
        self.sent_positions += len(positions)
        return news, positions

    def _see(self, event: StreamEvent) -> dict[str | int, ToolCallDelta]:
        """Add an event's text. Returns the new calls, by their numbers."""
        begun: dict[str | int, ToolCallDelta] = {}
        for part, text in (("reasoning", event.reasoning), ("content", event.text)):
            if text:
                self.seen[part] = self.seen.get(part, "") + text
        for call in event.tool_calls:
            if call.id is not None:
                known = self.calls.setdefault(call.index, call)
                if (known.id, known.name) != (call.id, call.name):
                    raise diverged()
                if call.index not in self.sent:
                    begun[call.index] = call
            self.seen[call.index] = self.seen.get(call.index, "") + call.arguments
        return begun


def diverged() -> ApiError:
    return ApiError(500, "the generation began again and went another way", "stream_diverged")


class CompletionStream:
    """The chunks of one request's response."""

    def __init__(self, ask: ParsedRequest, handles: Sequence[AsyncJobHandle]) -> None:
        self._ask = ask
        self._ends_at = asyncio.get_running_loop().time() + ask.timeout_s + GRACE_S
        self._handles = handles
        self._samples = {(p, i): _Sample() for p in range(len(handles)) for i in range(ask.n)}
        self._results: dict[int, Result] = {}
        self._ended: set[int] = set()
        self._created = int(time.time())
        head = {
            "id": completion_id(ask.url, handles[0].id),
            "object": "chat.completion.chunk" if is_chat(ask.url) else "text_completion",
            "created": self._created,
            "model": ask.model,
        }
        self._head = _json(head)[:-1]
        """The common start of all chunks."""
        self.has_failed = False
        """True if a server error ended the stream after its headers."""

    def unfinished(self) -> list[AsyncJobHandle]:
        """Return the jobs that have not ended."""
        return [handle for number, handle in enumerate(self._handles) if number not in self._ended]

    def usage(self) -> Usage:
        """Return the usage of the jobs that have ended."""
        return total_usage(result.usage for result in self._results.values())

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield events to send. Errors before the first event are raised, later ones are sent."""
        has_begun = False
        try:
            async for number, event in self._timely(self._events()):
                for part in _parts(event):
                    if part.offset > event.offset:
                        await asyncio.sleep(0)
                    for chunk in await self._chunks_of(number, part):
                        has_begun = True
                        yield chunk
        except (PagemillError, ApiError) as error:
            if not has_begun:
                raise
            api_error = error if isinstance(error, ApiError) else as_api_error(error)
            self.has_failed = api_error.status >= 500
            yield self._failing(api_error)
            return
        for chunk in self._closing():
            yield chunk

    def _closing(self) -> list[bytes]:
        """Return the events after the last sample's end."""
        usage = [self._chunk(b"[]", usage_body(self.usage()))] if self._ask.include_usage else []
        return [*usage, _DONE]

    def _failing(self, error: ApiError) -> bytes:
        return _event(error.body())

    async def _timely(
        self, events: AsyncIterator[tuple[int, StreamEvent]]
    ) -> AsyncIterator[tuple[int, StreamEvent]]:
        """Forward events. Raises ResultTimeout if the queue has not ended the jobs at their deadline."""
        while True:
            try:
                async with asyncio.timeout_at(self._ends_at):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise ResultTimeout("the outcome of the job is unknown") from None
            yield event

    async def _events(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        if len(self._handles) == 1:
            async for event in self._handles[0].stream():
                yield 0, event
            return
        async for merged in _merged(self._handles):
            yield merged

    async def _chunks_of(self, number: int, event: StreamEvent) -> list[bytes]:
        if event.type == "end":
            return await self._last_chunks(number)
        sample = self._samples[number, event.index]
        news, positions = sample.take(event)
        if not news and not positions:
            return []
        return [*self._begin(number, event.index), *self._pieces(number, event.index, news, positions)]

    def _pieces(
        self, number: int, index: int, news: list[TextDelta], positions: tuple[PositionLogprobs, ...] | None
    ) -> list[bytes]:
        """Return an event for each part's text; the first has the log probabilities."""
        pieces = []
        for one in news or [TextDelta("content", "")]:
            body = {"delta": _delta(one)} if is_chat(self._ask.url) else {"text": one.text}
            sample = self._samples[number, index]
            offset = len(sample.sent[one.part]) - len(one.text) if one.text else sample.sent_characters
            logprobs = logprobs_body(self._ask.url, positions or None, offset)
            if positions:
                sample.sent_characters = offset + len(joined_text(positions))
            pieces.append(self._chunk(self._choice(number, index, body, logprobs)))
            positions = None
        return pieces

    async def _last_chunks(self, number: int) -> list[bytes]:
        try:
            result = await self._handles[number].result(END_PATIENCE_S)
        finally:
            self._ended.add(number)
        self._results[number] = result
        chunks = []
        for output in result.outputs:
            self._samples[number, output.index].check_end()
            chunks += self._begin(number, output.index)
            chunks += self._finish(number, output)
        return chunks

    def _finish(self, number: int, output: Output) -> list[bytes]:
        """Return the events that end a sample."""
        body: dict[str, Any] = {"delta": {}} if is_chat(self._ask.url) else {"text": ""}
        choice = self._choice(number, output.index, body, finish_reason=finish_reason(output))
        return [self._chunk(choice)]

    def _begin(self, number: int, index: int) -> list[bytes]:
        """Return a chat's first chunk, which contains the role, unless it was sent."""
        sample = self._samples[number, index]
        if sample.has_begun or not is_chat(self._ask.url):
            return []
        sample.has_begun = True
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk(self._choice(number, index, {"delta": delta}))]

    def _choice(
        self,
        number: int,
        index: int,
        body: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        """Return the JSON of the only choice in a chunk."""
        choice = {
            "index": number * self._ask.n + index,
            **body,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return b"[%b]" % _json(choice)

    def _chunk(self, choices: bytes, usage: dict[str, Any] | None = None) -> bytes:
        end = b',"usage":%b' % _json(usage) if self._ask.include_usage else b""
        return b'data: %b,"choices":%b%b}\n\n' % (self._head, choices, end)


def _parts(event: StreamEvent) -> Iterator[StreamEvent]:
    """Split an event with many log-probabilities: the first part has all of the text."""
    positions = event.logprobs
    if positions is None or len(positions) <= _MAX_POSITIONS:
        yield event
        return
    start = 0
    while start < len(positions):
        end = start + _MAX_POSITIONS
        while end < len(positions) and is_part_of_character(positions[end].chosen):
            end += 1  # not between the tokens of one character
        changes: dict[str, Any] = {"offset": event.offset + start, "logprobs": positions[start:end]}
        if start:
            changes |= {"type": "token", "text": "", "reasoning": "", "tool_calls": ()}
        yield event.model_copy(update=changes)
        start = end


async def _merged(handles: Sequence[AsyncJobHandle]) -> AsyncIterator[tuple[int, StreamEvent]]:
    """Merge the events of several jobs as they arrive. Raises the first error of any job."""
    queue: asyncio.Queue[tuple[int, StreamEvent] | Exception | None] = asyncio.Queue(_MERGED_EVENTS)

    async def pump(number: int, handle: AsyncJobHandle) -> None:
        try:
            async for event in handle.stream():
                await queue.put((number, event))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(number, handle)) for number, handle in enumerate(handles)]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _delta(news: TextDelta) -> dict[str, Any]:
    """Return a chat's delta for one part's new text."""
    match news.part:
        case "content":
            return {"content": news.text}
        case "reasoning":
            return reasoning_body(news.text)
    function = {"arguments": news.text}
    if news.call is None:
        return {"tool_calls": [{"index": news.part, "function": function}]}
    function["name"] = news.call.name or ""
    return {
        "tool_calls": [{"index": news.part, "id": news.call.id, "type": "function", "function": function}]
    }


def _json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _json(body)


class EventStream(Response):
    """A response of server-sent events. `closed` is called once, whenever it ends."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], ping_s: float, closed: Callable[[], None]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._ping_s = ping_s
        self._closed = closed
        self._is_over = False
        self._sent_at = math.inf
        """`time.monotonic()` of the last transmission; infinity during and before it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        beside = asyncio.create_task(self._attend(receive, send))
        beside.add_done_callback(lambda _: None if self._is_over else task.cancel())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, self._first)
            async for chunk in self._rest:
                await self._send(send, chunk)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if beside.done():
                task.uncancel()
                beside.result()  # raises the client's error from sending a comment
                return
            # The gateway is stopping: the client must know that its response is incomplete.
            await send({"type": "http.response.body", "body": _event(stopping().body()), "more_body": False})
            raise
        finally:
            self._is_over = True
            self._closed()
            beside.cancel()
            await self._rest.aclose()

    async def _send(self, send: Send, chunk: bytes) -> None:
        self._sent_at = math.inf
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sent_at = time.monotonic()

    async def _attend(self, receive: Receive, send: Send) -> None:
        """Send a comment after a long time without other data. Returns when the client disconnects."""
        while True:
            idle_s = time.monotonic() - self._sent_at
            if idle_s >= self._ping_s:
                await self._send(send, _PING)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ping_s - max(0.0, idle_s)):
                    return await _hang_up(receive)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
