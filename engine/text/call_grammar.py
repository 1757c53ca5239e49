"""Grammars of tool calls, in llguidance's Lark: a family's syntax around JSON that a function's schema allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pagemill.chat.families import CallForm
from pagemill.engine.text.tokenizer import Tokenizer
from pagemill.structured_outputs import StructuredOutputs

MAX_CALLS = 16
"""Calls in one answer, where a grammar counts them."""
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    schema: Mapping[str, Any]
    is_strict: bool

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> Function:
        """Read OpenAI's form; without parameters, a call has none."""
        return cls(function["name"], function.get("parameters") or _ANY_OBJECT, bool(function.get("strict")))


class CallGrammar:
    """Writes the grammars of a model's calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def forced(self, functions: Sequence[Function], form: CallForm, *, is_single: bool) -> StructuredOutputs:
        """The output is one call or more. Raises InvalidParameter if the schemas are too large."""
        return self._lark("start: calls", self._calls(functions, form, is_single=is_single))

    def either(
        self, functions: Sequence[Function], form: CallForm, schema: str, *, is_single: bool
    ) -> StructuredOutputs:
        """As `forced`, or else JSON that the schema allows."""
        rules = [
            *self._calls(functions, form, is_single=is_single),
            f"answer: %json {_styled(json.loads(schema))}",
        ]
        return self._lark("start: calls | answer", rules)

    def triggered(self, functions: Sequence[Function], form: CallForm) -> StructuredOutputs:
        """The rest of one call after `form.trigger`."""
        return self._lark("start: call", self._call(functions, form, form.trigger, form.end))

    def _calls(self, functions: Sequence[Function], form: CallForm, *, is_single: bool) -> Iterator[str]:
        begin, separator, end = map(self._literal, (form.begin, form.separator, form.end))
        more = "" if is_single else f"({separator} call){{0,{MAX_CALLS - 1}}}"
        yield f"calls: {begin} call {more} {end}"
        yield from self._call(functions, form)

    def _call(
        self, functions: Sequence[Function], form: CallForm, written: str = "", end: str = ""
    ) -> Iterator[str]:
        yield "call: " + " | ".join(f"call_{number}" for number in range(len(functions)))
        for number, function in enumerate(functions):
            head = (form.begin if written else "") + form.head(function.name)
            # A trigger that is not how a call begins would have been written for nothing.
            assert head.startswith(written), form
            begin, after = self._literal(head[len(written) :]), self._literal(form.after + end)
            yield f"call_{number}: {begin} arguments_{number} {after}"
            yield f"arguments_{number}: %json {_styled(function.schema)}"

    def _lark(self, start: str, rules: Any) -> StructuredOutputs:
        return StructuredOutputs(grammar="\n".join(["%llguidance {}", start, *rules]) + "\n")

    def _literal(self, text: str) -> str:
        """Write a text; special tokens in it by their ids, since no text stands for them."""
        if not text:
            return ""
        parts = [text] if self._special is None else self._special.split(text)
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, text: str) -> str:
        if self._special is not None and self._special.fullmatch(text):
            return f"<[{self._special_ids[text]}]>"
        return json.dumps(text, ensure_ascii=False)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        described = json.loads(self._tokenizer.to_json() or "{}")
        return {
            token["content"]: token["id"] for token in described.get("added_tokens", ()) if token["special"]
        }

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        names = sorted(filter(None, self._special_ids), key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None


def _styled(schema: Any) -> str:
    """Return a schema as JSON, with one way to write each value."""
    if schema is True:
        schema = {}
    return json.dumps(schema | {"x-guidance": _STYLE} if isinstance(schema, dict) else schema)
