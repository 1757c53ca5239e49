"""One request to an endpoint: the data sent, and the output received."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from pagemill.engine.outputs import (
    UNKNOWN_TOKEN,
    CompletionDelta,
    FinishReason,
    RequestOutput,
    SampleState,
    Usage,
)
from pagemill.worker.engine_host.endpoint.connection import BadAnswer, Connection, Interrupted
from pagemill.worker.engine_host.endpoint.dialect import Piece, Query, body, counts, pieces
from pagemill.worker.engine_host.endpoint.inputs import TextPrompt
from pagemill.worker.engine_host.endpoint.served import EndpointModel
from pagemill.worker.engine_host.messages import AddRequest

EXTRA_EVENTS = 64
"""Events with text beyond a job's max_tokens after which a stream counts as endless."""
LAST_EVENT_S = 2.0
"""Maximum wait for the usage event after the end of all samples."""
_TOO_MANY = "the engine's response has more tokens than the job asked for"
OnEvent = Callable[[dict[str, Any]], None]


class Relay:
    """Sends a request and reports its output as an engine does. Used once, in one event loop."""

    def __init__(
        self,
        request: AddRequest,
        model: EndpointModel,
        report: Callable[[RequestOutput], None],
        check: OnEvent,
    ) -> None:
        """
        Args:
            report: receives all outputs except the last.
            check: receives each event first.
        """
        self._request = request
        self._model = model
        self._report = report
        self._check = check
        self._began = time.monotonic()
        self._num_tokens = [0] * request.params.n
        self._reasons: list[FinishReason | None] = [None] * request.params.n
        self._cached = 0
        self.ttft_s: float | None = None

    async def run(self, connection: Connection, stall_s: float) -> None:
        """Return once all samples have ended.

        Args:
            stall_s: seconds without output after which the request counts as hung.

        Raises:
            EngineError: as `Connection.events` does.
            TimeoutError: the request hangs.
        """
        queries = list(self._queries())
        try:
            async with asyncio.TaskGroup() as group:
                for query in queries:
                    group.create_task(self._follow(query, connection, stall_s))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def last_output(self) -> RequestOutput:
        """Return the output that ends the request, without the reason."""
        output = self._output([])
        output.finished, output.ttft_s = True, self.ttft_s
        output.usage = Usage(
            output.prompt_tokens, sum(self._num_tokens), min(self._cached, output.prompt_tokens)
        )
        return output

    @property
    def reason(self) -> FinishReason:
        """Return how the first sample ended."""
        return self._reasons[0] or "error"

    def _queries(self) -> Iterator[Query]:
        """Yield the requests to send: one for all samples, or one per sample if that is not supported."""
        params, prompt = self._request.params, self._request.prompt_token_ids
        states = self._request.resume
        is_limited = not isinstance(prompt, TextPrompt) or prompt.is_limited
        most = params.max_tokens if is_limited else None
        if states is None and (params.n == 1 or self._model.identity.dialect.has_samples):
            yield self._query(SampleState(0, []), params.n, most)
            return
        for state in states or [SampleState(index, []) for index in range(params.n)]:
            self._num_tokens[state.index] = len(state.token_ids)
            self._reasons[state.index] = state.finish_reason
            left = None if most is None else most - len(state.token_ids)
            if state.finish_reason is not None:
                continue
            if left is not None and left < 0:
                raise BadAnswer(_TOO_MANY)
            if left == 0:  # all tokens were committed, but not the end
                self._report(self._output([self._add(Piece(state.index, "", None, "length", None), 0)]))
            else:
                yield self._query(state, 1, left)

    def _query(self, state: SampleState, num_samples: int, max_tokens: int | None) -> Query:
        given, text = self._request.prompt_token_ids, state.text
        prompt: str | list[int] | None = None
        messages: list[Any] | None = None
        if not isinstance(given, TextPrompt):
            tokenizer = self._model.tokenizer
            prompt = list(given)
            if text and tokenizer is not None:
                prompt += tokenizer.encode(text, add_special_tokens=False)
        elif given.messages is None:
            prompt = (given.text or "") + text
        else:
            messages = [*given.messages, *([{"role": "assistant", "content": text}] if text else [])]
        params = self._request.params
        return Query(
            model=self._model.identity.model,
            prompt=prompt,
            messages=messages,
            params=replace(params, min_tokens=max(0, params.min_tokens - len(state.token_ids))),
            max_tokens=max_tokens,
            first=state.index,
            num_samples=num_samples,
            is_resumed=bool(text),
            salt=self._request.cache_salt,
        )

    async def _follow(self, query: Query, connection: Connection, stall_s: float) -> None:
        """Read the response to one request until its samples have ended, regardless of later events."""
        sent = body(query, self._model.identity.dialect)
        try:
            async with (
                asyncio.timeout(stall_s) as patience,
                aclosing(connection.events(query.path, sent)) as events,
            ):
                part = _Part(query, self._model.limits.max_model_len)
                async for event in events:
                    self._check(event)
                    if self._take(part, event):
                        left_s = LAST_EVENT_S if self._has_ended(query) else stall_s
                        patience.reschedule(asyncio.get_running_loop().time() + left_s)
        except (Interrupted, BadAnswer, TimeoutError):
            if not self._has_ended(query):
                raise
        if not self._has_ended(query):
            raise Interrupted("the engine's response ended before the output")

    def _has_ended(self, query: Query) -> bool:
        return None not in self._reasons[query.first : query.first + query.num_samples]

    def _take(self, part: _Part, event: dict[str, Any]) -> bool:
        """Report the additions of an event; False if there are none."""
        found, stated = pieces(event, part.query.num_samples), counts(event)
        if stated is not None:
            self._cached = max(self._cached, stated.cached)
            if isinstance(prompt := self._request.prompt_token_ids, TextPrompt) and part.is_first(
                stated.prompt
            ):
                prompt.resize(min(stated.prompt, self._model.limits.max_model_len))
        deltas = []
        for piece in found:
            number = part.count(piece, stated.completion if stated is not None and len(found) == 1 else None)
            if piece.text or number or piece.finish_reason is not None:
                deltas.append(self._add(replace(piece, index=piece.index + part.query.first), number))
        if stated is not None and not found and (rest := part.rest(stated.completion)):
            last = part.query.first + part.query.num_samples - 1
            deltas.append(self._add(Piece(last, "", None, None, None), rest))
        if deltas:
            if self.ttft_s is None:
                self.ttft_s = time.monotonic() - self._began
            self._report(self._output(deltas))
        return bool(deltas)

    def _add(self, piece: Piece, number: int) -> CompletionDelta:
        index, offset = piece.index, self._num_tokens[piece.index]
        ids = piece.token_ids if piece.token_ids is not None else [UNKNOWN_TOKEN] * number
        self._num_tokens[index] += len(ids)
        self._reasons[index] = piece.finish_reason or self._reasons[index]
        return CompletionDelta(
            index, ids, piece.text, offset, finish_reason=piece.finish_reason, stop_reason=piece.stop_reason
        )

    def _output(self, deltas: list[CompletionDelta]) -> RequestOutput:
        size, is_read = len(self._request.prompt_token_ids), self.ttft_s is not None
        return RequestOutput(
            self._request.request_id, "decode" if is_read else "prefill", size if is_read else 0, size, deltas
        )


class _Part:
    """The response to one request: its tokens, and its maximum length."""

    def __init__(self, query: Query, max_model_len: int) -> None:
        self.query = query
        self._most = (query.max_tokens or max_model_len) * query.num_samples
        self._num_tokens = 0
        self._num_events = 0
        self._has_prompt = False

    def is_first(self, num_prompt_tokens: int) -> bool:
        """Return True once: for the first nonempty count of the prompt's tokens."""
        is_first = not self._has_prompt and num_prompt_tokens > 0 and not self.query.is_resumed
        self._has_prompt = self._has_prompt or num_prompt_tokens > 0
        return is_first

    def count(self, piece: Piece, stated: int | None) -> int:
        """Return the tokens of a piece: its ids, the endpoint's count, or one. Raises `BadAnswer`: too many."""
        self._num_events += bool(piece.text)
        if piece.token_ids is not None:
            number = len(piece.token_ids)
        elif stated is not None:
            number = self.rest(stated, is_last=False)
        else:
            number = 1 if piece.text else 0
        self._num_tokens += number
        if max(self._num_events, self._num_tokens) > self._most + EXTRA_EVENTS:
            raise BadAnswer(_TOO_MANY)
        return number

    def rest(self, stated: int, *, is_last: bool = True) -> int:
        """Return how many more tokens the endpoint reports than have been counted, within the job's limit."""
        number = max(0, min(stated, self._most) - self._num_tokens)
        if is_last:
            self._num_tokens += number
        return number
