"""The parts of a sample's text, for results, streams and partial output alike."""

from __future__ import annotations

from typing import Any

from pagemill.common.chat.syntax import ChatSyntax
from pagemill.producer.wire.chat.parser import ChatParser
from pagemill.producer.wire.chat.pieces import Answer
from pagemill.producer.wire.schema.text.chat import FunctionCall, ToolCall, ToolCallDelta, call_id


class ParsedText:
    """Parses a growing sample's text; without a syntax all of it is content."""

    def __init__(self, syntax: str | None, job_id: str, index: int) -> None:
        self._parser = ChatParser(ChatSyntax() if syntax is None else ChatSyntax.read(syntax))
        self._answer = Answer()
        self._name = job_id, index

    @classmethod
    def parse(cls, syntax: str | None, job_id: str, index: int, text: str) -> ParsedText:
        parsed = cls(syntax, job_id, index)
        parsed.add(text, is_end=True)
        return parsed

    def add(self, text: str, *, is_end: bool = False) -> None:
        self._answer.add(self._parser.feed(text))
        if is_end:
            self._answer.add(self._parser.finish())

    def output_fields(self) -> dict[str, Any]:
        """Return the `text`, `reasoning` and `tool_calls` of an `Output`."""
        calls = tuple(
            ToolCall.model_construct(
                id=call_id(*self._name, number),
                function=FunctionCall.model_construct(name=call.name, arguments=call.arguments),
            )
            for number, call in enumerate(self._answer.calls)
        )
        reasoning = self._answer.reasoning or None
        return {"text": self._answer.content, "reasoning": reasoning, "tool_calls": calls}


def new_call_parts(seen: tuple[ToolCall, ...], grown: tuple[ToolCall, ...]) -> tuple[ToolCallDelta, ...]:
    """Return the parts of `grown` that are not in `seen`."""
    parts = []
    for index, call in enumerate(grown):
        if index >= len(seen):
            name, arguments = call.function.name, call.function.arguments
            parts.append(ToolCallDelta(index=index, id=call.id, name=name, arguments=arguments))
        elif more := call.function.arguments[len(seen[index].function.arguments) :]:
            parts.append(ToolCallDelta(index=index, arguments=more))
    return tuple(parts)


def begins_with(grown: tuple[ToolCall, ...], seen: tuple[ToolCall, ...]) -> bool:
    """Return True if `grown` continues `seen`."""
    return len(grown) >= len(seen) and all(
        new.id == old.id and new.function.arguments.startswith(old.function.arguments)
        for new, old in zip(grown, seen, strict=False)
    )
