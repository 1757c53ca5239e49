"""/v1/responses: a chat's stream as the events of a response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagemill.producer.client.aio_handles import AsyncJobHandle
from pagemill.producer.gateway.errors import ApiError
from pagemill.producer.gateway.request_parsing import ParsedRequest
from pagemill.producer.gateway.streaming import CompletionStream, TextDelta
from pagemill.producer.openai import responses
from pagemill.producer.wire.schema.outputs import Output, PositionLogprobs


class ResponseStream(CompletionStream):
    """The events of one response. Its items open sequentially, in the order in which the model writes them.

    Text after a call is an item of its own, unlike in a response that is not streamed.
    """

    def __init__(self, ask: ParsedRequest, handle: AsyncJobHandle, asked: Mapping[str, Any]) -> None:
        super().__init__(ask, [handle])
        self._asked = asked
        self._job_id = handle.id
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        """The items that have ended."""
        self._open: str | int | None = None
        """The part whose item is open."""
        self._item: dict[str, Any] = {}
        self._text = ""
        """Text of the open item."""

    def _begin(self, number: int, index: int) -> list[bytes]:
        if self._num_events:
            return []
        body = responses.response(self._asked, self._job_id, self._created)
        return [self._event(f"response.{word}", response=body) for word in ("created", "in_progress")]

    def _pieces(
        self, number: int, index: int, news: list[TextDelta], positions: tuple[PositionLogprobs, ...] | None
    ) -> list[bytes]:
        events = []
        for one in news:
            if one.part != self._open:
                events += [*self._close_item("completed"), *self._open_item(one)]
            self._text += one.text
            if one.text:
                events.append(self._in_item(f"{_KINDS.get(one.part, _CALL)}.delta", one.part, delta=one.text))
        return events

    def _finish(self, number: int, output: Output) -> list[bytes]:
        is_cut = output.finish_reason == "length"
        events = []
        if self._open is None and not self._items:
            events = self._open_item(TextDelta("content", ""))
        return [*events, *self._close_item("incomplete" if is_cut else "completed")]

    def _closing(self) -> list[bytes]:
        result = self._results[0]
        body = responses.response(self._asked, self._job_id, self._created, result) | {"output": self._items}
        return [self._event(f"response.{body['status']}", response=body)]

    def _failing(self, error: ApiError) -> bytes:
        details = error.body()["error"]
        return self._event("error", code=details["code"], message=details["message"], param=details["param"])

    def _open_item(self, news: TextDelta) -> list[bytes]:
        self._open, self._text = news.part, ""
        match news.part:
            case "reasoning":
                self._item = responses.reasoning_item(self._job_id, None, "in_progress")
            case "content":
                self._item = responses.message_item(self._job_id, None, "in_progress")
            case _:
                call = news.call
                assert call is not None, "a call's first news has its name"
                self._item = responses.call_item(call.id or "", call.name or "", "", "in_progress")
        if number := sum(item["type"] == self._item["type"] for item in self._items if news.part in _KINDS):
            self._item["id"] += f"_{number}"
        events = [
            self._event("response.output_item.added", output_index=len(self._items), item=dict(self._item))
        ]
        if news.part in _KINDS:
            part = self._part("")
            events.append(self._in_item("response.content_part.added", news.part, part=part))
        return events

    def _close_item(self, status: str) -> list[bytes]:
        part = self._open
        if part is None:
            return []
        text = self._text
        if part in _KINDS:
            whole = self._part(text)
            events = [
                self._in_item(f"{_KINDS[part]}.done", part, text=text),
                self._in_item("response.content_part.done", part, part=whole),
            ]
            self._item["content"] = [whole]
        else:
            events = [self._in_item(f"{_CALL}.done", part, arguments=text, name=self._item["name"])]
            self._item["arguments"] = text
        self._item["status"] = status
        done = self._event("response.output_item.done", output_index=len(self._items), item=self._item)
        self._items.append(self._item)
        self._open = None
        return [*events, done]

    def _part(self, text: str) -> dict[str, Any]:
        return (
            responses.text_part(text) if self._open == "content" else {"type": "reasoning_text", "text": text}
        )

    def _in_item(self, kind: str, place_of: str | int, **fields: Any) -> bytes:
        place: dict[str, Any] = {"item_id": self._item["id"], "output_index": len(self._items)}
        if place_of in _KINDS:
            place["content_index"] = 0
        if kind.startswith("response.output_text."):
            place["logprobs"] = []
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        data = json.dumps(body, separators=(",", ":"), allow_nan=False)
        return f"event: {kind}\ndata: {data}\n\n".encode()


_KINDS: dict[str | int, str] = {"content": "response.output_text", "reasoning": "response.reasoning_text"}
_CALL = "response.function_call_arguments"
