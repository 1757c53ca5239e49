"""Grammars of tool calls in llguidance's Lark: a family's syntax around schema-conforming JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from pagemill.common.chat.families import Elements, ToolSyntax
from pagemill.common.schema_numbers import InexactInteger
from pagemill.common.schema_preparation import prepared_schema
from pagemill.common.schema_rewriting import TooLarge, rewritten
from pagemill.common.structured_outputs import MAX_SCHEMA, StructuredOutputs, closed_objects
from pagemill.engine.errors import InvalidRequest, UnsupportedFeature
from pagemill.engine.text.tokenizer import Tokenizer

MAX_CALLS = 16
"""Maximum number of calls in one output, if the grammar counts them."""
_MAX_REFERENCES = 8
"""Maximum number of references followed from a parameter's schema."""
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    schema: Mapping[str, Any]
    is_strict: bool

    @classmethod
    def from_definition(cls, function: Mapping[str, Any]) -> Function:
        """Read OpenAI's form; without parameters, calls have no arguments. Closes open objects (`closed_objects`).

        Raises:
            InvalidRequest: the parameters are not a JSON schema.
        """
        schema = closed_objects(normalized(function).get("parameters") or _ANY_OBJECT)
        return cls(function["name"], schema, bool(function.get("strict")))


def normalized(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function with an object as `properties` and a list as `required`, if its parameters have them.

    PHP writes an empty object as a list, and Go writes both as null.

    Raises:
        InvalidRequest: the parameters or one of them are not a JSON schema.
    """
    parameters = function.get("parameters")
    if not parameters:
        return dict(function)
    if isinstance(parameters, Mapping):
        schema = dict(parameters)
        for key, empty in (("properties", {}), ("required", [])):
            if key in schema and schema[key] in (None, []):
                schema[key] = empty
        properties, required = schema.get("properties", {}), schema.get("required", [])
        is_schema = isinstance(properties, Mapping) and isinstance(required, list)
        if is_schema and all(isinstance(part, Mapping | bool) for part in properties.values()):
            return {**function, "parameters": schema}
    raise InvalidRequest(f"tools: the parameters of {function['name']} are not a JSON schema of an object")


class CallGrammar:
    """Writes the grammars of a model's calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def forced(
        self, functions: Sequence[Function], syntax: ToolSyntax, *, is_single: bool
    ) -> StructuredOutputs:
        """Return a grammar of one or more calls. Raises InvalidParameter if the schemas are too large."""
        return self._lark("start: calls", self._calls(functions, syntax, is_single=is_single))

    def either(
        self, functions: Sequence[Function], syntax: ToolSyntax, schema: str, *, is_single: bool
    ) -> StructuredOutputs:
        """Return a grammar of calls as in `forced`, or alternatively of JSON that the schema allows."""
        answer = f"answer: {self._literal(syntax.form.answer)} %json {_styled(json.loads(schema))}"
        rules = chain(self._calls(functions, syntax, is_single=is_single), [answer])
        return self._lark("start: calls | answer", rules)

    def triggered(self, functions: Sequence[Function], syntax: ToolSyntax) -> StructuredOutputs:
        """Return a grammar of the rest of one call after `form.trigger`."""
        form = syntax.form
        return self._lark("start: call", self._call(functions, syntax, form.trigger, form.end))

    def _calls(self, functions: Sequence[Function], syntax: ToolSyntax, *, is_single: bool) -> Iterator[str]:
        form = syntax.form
        begin, separator, end = map(self._literal, (form.begin, form.separator, form.end))
        more = "" if is_single else f"({separator} call){{0,{MAX_CALLS - 1}}}"
        yield f"calls: {begin} call {more} {end}"
        yield from self._call(functions, syntax)

    def _call(
        self, functions: Sequence[Function], syntax: ToolSyntax, written: str = "", end: str = ""
    ) -> Iterator[str]:
        form = syntax.form
        yield "call: " + " | ".join(f"call_{number}" for number in range(len(functions)))
        for number, function in enumerate(functions):
            head = (form.begin if written else "") + form.head(function.name)
            # A trigger that does not start a call would have been written in vain.
            assert head.startswith(written), form
            begin, after = self._literal(head[len(written) :]), self._literal(form.after + end)
            yield f"call_{number}: {begin} arguments_{number} {after}"
            if syntax.elements is None:
                yield f"arguments_{number}: %json {_styled(function.schema)}"
            else:
                yield from self._elements(f"arguments_{number}", function.schema, syntax.elements)

    def _elements(self, rule: str, schema: Mapping[str, Any], elements: Elements) -> Iterator[str]:
        """Yield the rule of one function's parameters, in the schema's order."""
        required = schema.get("required", ())
        parts = []
        for number, (key, value) in enumerate(schema.get("properties", {}).items()):
            if value is False:
                continue
            part, is_text = f"{rule}_{number}", is_text_schema(value, schema)
            parts.append(part if key in required else f"{part}?")
            before = elements.before.replace("KEY", key).replace("TEXT", str(is_text).lower())
            if not is_text:
                shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
                styled = _styled(value if value is True else {**shared, **value})
                yield f"{part}: {self._literal(before)} %json {styled} {self._literal(elements.after)}"
                continue
            choices = value.get("enum") or ([value["const"]] if "const" in value else [])
            if choices:
                texts = " | ".join(self._literal(str(one)) or '""' for one in choices)
                yield f"{part}: {self._literal(before)} ({texts}) {self._literal(elements.after)}"
            elif self._special is None or not self._special.search(elements.after):
                yield f"{part}: {self._literal(before)} {part}_text"
                yield f"{part}_text[suffix={_quoted(elements.after)}]: /(?s:.*)/"
            else:  # no pattern extends up to a special token
                yield f"{part}: {self._literal(before)} {part}_text {self._literal(elements.after)}"
                yield f"{part}_text: /[^<]*/"
        yield f"{rule}: {' '.join(parts)}"

    def _lark(self, start: str, rules: Iterable[str]) -> StructuredOutputs:
        text = f"%llguidance {{}}\n{start}\n"
        for rule in rules:
            text += f"{rule}\n"
            if len(text) > MAX_SCHEMA:  # it is rejected: do not spend time on further schemas
                break
        return StructuredOutputs(grammar=text)

    def _literal(self, text: str) -> str:
        """Write a text, with special tokens by their ids, since no text represents them."""
        if not text:
            return ""
        parts = [text] if self._special is None else self._special.split(text)
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, text: str) -> str:
        if self._special is not None and self._special.fullmatch(text):
            return f"<[{self._special_ids[text]}]>"
        return _quoted(text)

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


def is_text_schema(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return True if a parameter's schema allows texts."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    if kinds is not None:
        return "string" in (kinds if isinstance(kinds, list) else [kinds])
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return all(isinstance(value, str) for value in values)
    branches = [one for name in ("anyOf", "oneOf", "allOf") for one in schema.get(name) or ()]
    return any(is_text_schema(one, root) for one in branches if not _refers(one))


def _refers(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "$ref" in schema


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _styled(schema: Any) -> str:
    """Return a schema as JSON, with a unique way to write each value.

    Keywords that the grammar library lacks are replaced if the result is equivalent, and unknown formats are omitted.
    """
    if schema is True:
        schema = {}
    try:
        text = json.dumps(prepared_schema(schema))
        equivalent = rewritten(text, is_loose=False)
    except InexactInteger as error:
        raise UnsupportedFeature(f"tools: {error}") from None
    except TooLarge:
        equivalent = None
    schema = json.loads(text if equivalent is None or equivalent.wider else equivalent.text)
    return json.dumps(schema | {"x-guidance": _STYLE} if isinstance(schema, dict) else schema)
