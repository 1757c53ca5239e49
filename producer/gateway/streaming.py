"""Answers as server-sent events: a job's stream as OpenAI's chunks.

Sent text cannot be taken back. When a job restarts after a retry, nothing is sent until it has new text; if
its text differs from what was sent, the stream ends with an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagemill.producer.client.aio_handles import AsyncJobHandle
from pagemill.producer.gateway.errors import ApiError, as_api_error, stopping
from pagemill.producer.gateway.request_parsing import Ask
from pagemill.producer.openai.formats import completion_id, is_chat, logprobs_body, total_usage, usage_body
from pagemill.producer.wire.schema.errors import PagemillError, ResultTimeout
from pagemill.producer.wire.schema.outputs import PositionLogprobs, Result, StreamEvent, Usage

GRACE_S = 5.0
"""Margin after the deadline, at which the queue itself ends a job, for a queue that does not."""
END_PATIENCE_S = 10.0
"""Timeout for the result, which normally exists once the stream has ended."""
_DONE = b"data: [DONE]\n\n"
_PING = b": waiting\n\n"
_MERGED_EVENTS = 64
"""Events of several jobs buffered for a slow client; the rest stays in Redis."""


@dataclass(slots=True)
class _Sample:
    """The text of one sample that was sent, and the text its job has generated in this run."""

    sent: str = ""
    sent_positions: int = 0
    seen: str = ""
    has_begun: bool = False

    def check_end(self) -> None:
        """Raise ApiError if the job has ended before it reached the text that was sent."""
        if self.seen != self.sent:
            raise diverged()

    def take(self, event: StreamEvent) -> tuple[str, tuple[PositionLogprobs, ...] | None]:
        """Return the text and logprobs to send now. Raises ApiError if the text contradicts `sent`."""
        self.seen = event.text if event.type == "snapshot" else self.seen + event.text
        if not self.seen.startswith(self.sent):
            if self.sent.startswith(self.seen):
                return "", None
            raise diverged()
        text = self.seen[len(self.sent) :]
        self.sent = self.seen
        if event.logprobs is None:
            return text, None
        news = event.logprobs[max(0, self.sent_positions - event.offset) :]
        self.sent_positions += len(news)
        return text, news


def diverged() -> ApiError:
    return ApiError(500, "the generation began again and went another way", "stream_diverged")


class CompletionStream:
    """The chunks of one request's answer."""

    def __init__(self, ask: Ask, handles: Sequence[AsyncJobHandle]) -> None:
        self._ask = ask
        self._ends_at = asyncio.get_running_loop().time() + ask.timeout_s + GRACE_S
        self._handles = handles
        self._samples = {(p, i): _Sample() for p in range(len(handles)) for i in range(ask.n)}
        self._results: dict[int, Result] = {}
        self._ended: set[int] = set()
        self._created = int(time.time())
        self.has_failed = False
        """A server error ended the stream after its head."""

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
                for chunk in await self._chunks_of(number, event):
                    has_begun = True
                    yield chunk
        except (PagemillError, ApiError) as error:
            if not has_begun:
                raise
            told = error if isinstance(error, ApiError) else as_api_error(error)
            self.has_failed = told.status >= 500
            yield _event(told.body())
            return
        if self._ask.include_usage:
            yield _event(self._chunk([], usage_body(self.usage())))
        yield _DONE

    async def _timely(
        self, events: AsyncIterator[tuple[int, StreamEvent]]
    ) -> AsyncIterator[tuple[int, StreamEvent]]:
        """Pass events on. Raises ResultTimeout if the queue has not ended the jobs at their deadline."""
        while True:
            try:
                async with asyncio.timeout_at(self._ends_at):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise ResultTimeout("the queue does not say how the job ended") from None
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
        text, positions = sample.take(event)
        if not text and not positions:
            return []
        return [*self._begin(number, event.index), self._piece(number, event.index, text, positions)]

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
            chunks.append(
                self._piece(number, output.index, "", None, finish_reason=output.finish_reason or "stop")
            )
        return chunks

    def _begin(self, number: int, index: int) -> list[bytes]:
        """Return a chat's first chunk, which holds the role, unless it was sent."""
        sample = self._samples[number, index]
        if sample.has_begun or not is_chat(self._ask.url):
            return []
        sample.has_begun = True
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [_event(self._chunk([self._choice(number, index, {"delta": delta})]))]

    def _piece(
        self,
        number: int,
        index: int,
        text: str,
        positions: tuple[PositionLogprobs, ...] | None,
        finish_reason: str | None = None,
    ) -> bytes:
        if is_chat(self._ask.url):
            body: dict[str, Any] = {"delta": {"content": text} if finish_reason is None else {}}
        else:
            body = {"text": text}
        offset = len(self._samples[number, index].sent) - len(text)
        logprobs = logprobs_body(self._ask.url, positions or None, offset)
        return _event(self._chunk([self._choice(number, index, body, logprobs, finish_reason)]))

    def _choice(
        self,
        number: int,
        index: int,
        body: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            "index": number * self._ask.n + index,
            **body,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": completion_id(self._ask.url, self._handles[0].id),
            "object": "chat.completion.chunk" if is_chat(self._ask.url) else "text_completion",
            "created": self._created,
            "model": self._ask.model,
            "choices": choices,
        }
        return chunk | {"usage": usage} if self._ask.include_usage else chunk


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


def _event(body: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


class EventStream(Response):
    """A response of server-sent events. `closed` is called once, however it ends."""

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_hang_up(receive))
        following: asyncio.Future[bytes] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            while not gone.done():
                following = following or asyncio.ensure_future(anext(self._rest, b""))
                either: set[asyncio.Future[Any]] = {following, gone}
                await asyncio.wait(either, timeout=self._ping_s, return_when=asyncio.FIRST_COMPLETED)
                chunk = _PING
                if following.done():
                    chunk, following = following.result(), None
                if not chunk:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                if not gone.done():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except asyncio.CancelledError:
            # The gateway is stopping: the client must know that its answer is incomplete.
            await send({"type": "http.response.body", "body": _event(stopping().body()), "more_body": False})
            raise
        finally:
            await self._close(gone, following)

    async def _close(self, gone: asyncio.Future[None], following: asyncio.Future[bytes] | None) -> None:
        self._closed()
        gone.cancel()
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await following
        await self._rest.aclose()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
