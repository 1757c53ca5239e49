"""Rewrites JSON schemas for the grammar library, which lacks `not`, `if`, dependencies and other keywords.

A keyword is replaced by equivalent others if possible, and omitted otherwise. The grammar then allows more than
the schema, and `engine/structured_output/verifier.py` checks finished outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from pagemill.common.schema_disjointness import Disjointness, finite_values

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
"""The formats that grammars enforce."""
_NARROWER = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
"""Standard formats that are replaced by an enforced one with a subset of their texts."""
_POINTER = "(/([^/~]|~[01])*)*"
_VARIABLE = r"([A-Za-z0-9_]|%[0-9A-Fa-f]{2})(\.?([A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(:[1-9][0-9]{0,3}|\*)?"
_CHARACTER = "([A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_REFERENCE = (
    f"^([A-Za-z][A-Za-z0-9+.-]*:)?(//{_CHARACTER}*(:[0-9]*)?)?{_CHARACTER}*(/({_CHARACTER}|:)*)*"
    rf"(\?({_CHARACTER}|[:/?])*)?(#({_CHARACTER}|[:/?])*)?$"
)
_FORMAT_PATTERNS = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "uri-template": rf"^({_CHARACTER}|[:/?#]|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*$",
}
"""Standard formats whose texts, or most of them, match a pattern."""
VERIFIED_FORMATS = frozenset({"regex"})
MAX_NODES = 20_000
"""Maximum number of subschemas in a rewritten schema, and of branch comparisons."""
_MAX_NAME = 60
_MAX_DEPENDENCIES = 3
"""Each one doubles the combinations that the grammar library multiplies out."""
_TYPES = ("null", "boolean", "object", "array", "string", "number")
_MAPS = frozenset({"properties", "patternProperties"})
_LISTS = frozenset({"allOf", "anyOf", "prefixItems"})
_PLACES = frozenset({"items", "additionalItems", "additionalProperties"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_LEFT_OUT = frozenset(
    {"uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "unevaluatedItems"}
    | {"unevaluatedProperties", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
)
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "dependencies"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
)
_OPPOSITES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
}


_NOT_ONLY = re.compile(r"\^\(\?!\^?\[(?!\^)((?:[^\]\\]|\\.)+)\]\*\$\)")
"""At the start of a pattern: excludes texts that only consist of the characters of a class."""
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")


def without_look_around(pattern: str) -> tuple[str, str | None, bool]:
    """Remove look-around from a pattern, which regular expressions of grammars do not support.

    Pydantic describes a `Decimal` by `^(?!^[-+.]*$)` before the digits: not only signs and points.

    Returns:
        A pattern for at least the same texts; a second one, if there is one, that those match too; and whether both
        together match the same texts only.
    """
    required = None
    if (start := _NOT_ONLY.match(pattern)) is not None:
        required = f"[^{start[1]}]"
        pattern = "^" + pattern[start.end() :].removeprefix("^")
    kept, is_exact = "", True
    place = 0
    for token in PATTERN_TOKEN.finditer(pattern):
        if token.start() < place:
            continue
        if not _LOOK_AROUND.fullmatch(token[0]):
            kept += token[0]
        elif (end := _closing(pattern, token.end())) is not None:
            place, is_exact = end + 1, False
        else:
            return pattern, required, True  # not a valid pattern
    return kept, required, is_exact


PATTERN_TOKEN = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|\(\?<?[=!]|.", re.DOTALL)
"""An escape, a class, the start of a look-around, or any other character."""


def _closing(pattern: str, start: int) -> int | None:
    """Return the index of the parenthesis that closes a group whose text starts at `start`."""
    depth = 1
    for token in PATTERN_TOKEN.finditer(pattern, start):
        depth += token[0].startswith("(") - (token[0] == ")")
        if depth == 0:
            return token.start()
    return None


class TooLarge(Exception):
    """The rewritten schema would exceed `MAX_NODES`."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema for the grammar library, and its differences from the original."""

    text: str
    wider: tuple[str, ...]
    """Omitted keywords."""
    formats: tuple[str, ...]
    """Formats that are not enforced."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about an output for users."""
        notes = []
        if self.wider:
            keywords = ", ".join(self.wider)
            notes.append(
                f"structured_outputs.json: {keywords} did not constrain the output, which was verified at its end"
            )
        notes += [
            f"structured_outputs.json: the format {name!r} is not supported and was not checked"
            for name in self.formats
        ]
        return tuple(notes)


def rewritten(text: str, *, is_loose: bool) -> Rewritten:
    """Rewrite a schema.

    Args:
        text: valid JSON.
        is_loose: omit each keyword in question, and those that the library can rarely combine.

    Raises:
        TooLarge: the result would exceed `MAX_NODES`.
    """
    rewriter = _Rewriter(json.loads(text), is_loose=is_loose)
    schema = rewriter.document()
    wider, formats = (tuple(sorted(names)) for names in (rewriter.wider, rewriter.formats))
    return Rewritten(json.dumps(schema, ensure_ascii=False), wider, formats)


class _Rewriter:
    def __init__(self, root: Any, *, is_loose: bool) -> None:
        self._root = root
        self._is_loose = is_loose
        self.wider: set[str] = set()
        self.formats: set[str] = set()
        self._names: dict[str, str] = {}
        """The targets of references, and the names of their definitions."""
        self._unwritten: list[str] = []
        self._definitions: dict[str, Any] = {}
        self._num_nodes = 0
        self._disjointness = Disjointness(self._target, MAX_NODES)

    def document(self) -> Any:
        schema = self._schema(self._root)
        while self._unwritten:  # not recursively: a chain of definitions may be long
            target = self._unwritten.pop()
            self._definitions[self._names[target]] = self._schema(self._target(target))
        return schema if not self._definitions else schema | {"$defs": self._definitions}

    def _schema(self, schema: Any) -> Any:
        """Return a schema without unsupported keywords. It is as deep as its checked original."""
        if not isinstance(schema, dict):
            return schema
        self._count()
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                kept[key] = {name: self._schema(part) for name, part in value.items()}
            elif (key in _LISTS or key == "items") and isinstance(value, list):
                kept[key] = [self._schema(part) for part in value]
            elif key in _PLACES:
                kept[key] = self._schema(value)
            elif key == "$ref":
                kept[key] = self._reference(value)
            elif key == "format":
                kept |= self._format(schema, value)
            elif key == "pattern" and isinstance(value, str):
                kept[key], _, _ = without_look_around(value)
            elif key not in _DEFINITIONS and key not in _LEFT_OUT and key not in _EXPANDED:
                kept[key] = value
        kept |= self._of_names(schema)
        self._leave_out(schema, kept)
        parts = [part for part in self._conjuncts(schema) if part is not True]
        if self._is_loose:
            self._loosen(schema, kept, parts)
        if False in parts:
            return False
        if not parts:
            return kept
        if len(parts) == 1 and parts[0].keys() == {"anyOf"} and "anyOf" not in kept:
            return kept | parts[0]
        return kept | {"allOf": [*kept.get("allOf", ()), *parts]}

    def _of_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema that enforces `propertyNames`, if possible: a list of the properties, or a pattern."""
        names = schema.get("propertyNames")
        if isinstance(names, dict) and "$ref" in names and not names.keys() - {"$ref"} - _ANNOTATIONS:
            names = self._target(names["$ref"])
        if (
            not isinstance(names, dict)
            or "patternProperties" in schema
            or _IN_PLACE & (schema.keys() | names.keys())
        ):
            return {}
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        few = finite_values(names)
        if few is not None and isinstance(known, dict):
            allowed = dict.fromkeys(name for name in few if isinstance(name, str))
            return {
                "properties": {
                    name: self._schema(known.get(name, others))
                    for name in (*known, *allowed)
                    if name in allowed
                },
                "additionalProperties": False,
            }
        if known or names.keys() - _ANNOTATIONS - {"type", "pattern", "minLength", "maxLength"}:
            return {}
        low, high = names.get("minLength", 0), names.get("maxLength", "")
        if "pattern" not in names:
            pattern = rf"^[\s\S]{{{low},{high}}}$"
        elif low == 0 and high == "" and isinstance(names["pattern"], str):
            pattern = names["pattern"]
        else:
            return {}
        return {"patternProperties": {pattern: self._schema(others)}, "additionalProperties": False}

    def _format(self, schema: dict[str, Any], name: Any) -> dict[str, Any]:
        """Return a schema that enforces a format, if possible."""
        if "type" in schema and "string" not in schema["type"]:
            return {}
        if isinstance(name, str) and (name in FORMATS or name in _NARROWER):
            return {"format": _NARROWER.get(name, name)}
        if isinstance(name, str) and name in VERIFIED_FORMATS:
            self.wider.add("format")
        elif not isinstance(name, str) or name not in _FORMAT_PATTERNS:
            self.formats.add(str(name)[:_MAX_NAME])
        return {}

    def _conjuncts(self, schema: dict[str, Any]) -> Iterator[Any]:
        """Yield rewritten schemas that are equivalent to unsupported keywords."""
        if isinstance(given := schema.get("pattern"), str):
            _, required, is_exact = without_look_around(given)
            if required is not None:
                yield {"pattern": required}
            if not is_exact:
                self.wider.add("pattern")
        if (pattern := _FORMAT_PATTERNS.get(str(schema.get("format")))) is not None:
            yield {"pattern": pattern}
        if isinstance(branches := schema.get("oneOf"), list):
            beside = {"type": schema["type"]} if "type" in schema else {}
            if self._is_loose or not self._disjointness.of_all(
                [{"allOf": [one, beside]} for one in branches]
            ):
                self.wider.add("oneOf")
            yield {"anyOf": [self._schema(branch) for branch in branches]}
        for key, expanded in self._expansions(schema):
            if expanded is None or self._is_loose:
                self.wider.add(key)
            else:
                yield self._schema(expanded)

    def _expansions(self, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield keywords with their equivalents; None if there are none."""
        if "not" in schema:
            yield "not", self._negation(schema["not"], schema)
        if "if" in schema:
            yield "if", self._choice_of(schema)
        given = [
            (key, name, value)
            for key in ("dependencies", "dependentRequired", "dependentSchemas")
            if isinstance(schema.get(key), dict)
            for name, value in schema[key].items()
        ]
        for key, name, value in given:
            consequence = {"required": [name, *value]} if isinstance(value, list) else value
            if isinstance(value, dict):
                consequence = {"allOf": [{"required": [name]}, value]}
            is_few = len(given) <= _MAX_DEPENDENCIES
            yield key, {"anyOf": [{"properties": {name: False}}, consequence]} if is_few else None

    def _choice_of(self, schema: dict[str, Any]) -> Any:
        condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
        if (unmet := self._negation(condition, schema)) is None:
            return None
        return {"anyOf": [_both(condition, then), _both(unmet, otherwise)]}

    def _negation(self, schema: Any, beside: Any) -> Any:
        """Return a schema for all other values, or None if there is no simple one.

        Args:
            beside: a schema that the value also matches, which may list the possible values.
        """
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            return None
        self._count()
        if "not" in schema and len(schema) == 1:
            return schema["not"]
        pieces: list[Any] = []
        for key, value in schema.items():
            if key in _ANNOTATIONS:
                continue
            piece = self._negated_keyword(key, value, beside)
            if piece is None:
                return None
            pieces.append(piece)
        return _any_of(pieces)

    def _negated_keyword(self, key: str, value: Any, beside: Any) -> Any:
        if key in _OPPOSITES and isinstance(value, int | float) and not isinstance(value, bool):
            kind, opposite, step = _OPPOSITES[key]
            return False if step < 0 and value < 1 else {"type": kind, opposite: value + step}
        match key, value:
            case "type", str() | list():
                excluded = {value} if isinstance(value, str) else {str(name) for name in value}
                if excluded >= {"integer"} and "number" not in excluded:
                    return None
                others = [name for name in _TYPES if name not in excluded]
                return {"type": others} if others else False
            case (("const" | "enum"), _):
                excluded = {_canonical(one) for one in (value if key == "enum" else [value])}
                known = finite_values(beside)
                if known is None:
                    return None
                others = [one for one in known if _canonical(one) not in excluded]
                return {"enum": others} if others else False
            case "required", list():
                return _any_of([{"type": "object", "properties": {str(name): False}} for name in value])
            case "properties", dict():
                return self._negated_properties(value, beside)
            case "not", _:
                return value
            case (("anyOf" | "allOf"), list()):
                parts = [self._negation(part, beside) for part in value]
                return None if None in parts else {"allOf": parts} if key == "anyOf" else _any_of(parts)
        return None

    def _negated_properties(self, properties: dict[str, Any], beside: Any) -> Any:
        known = beside.get("properties", {}) if isinstance(beside, dict) else {}
        pieces = []
        for name, part in properties.items():
            negated = self._negation(part, known.get(name) if isinstance(known, dict) else None)
            if negated is None:
                return None
            pieces.append({"type": "object", "required": [name], "properties": {name: negated}})
        return _any_of(pieces)

    def _leave_out(self, schema: dict[str, Any], kept: dict[str, Any]) -> None:
        """Record the keywords missing in `kept`, unless they have no effect."""
        for key in _LEFT_OUT & schema.keys():
            value = schema[key]
            is_alone = not _IN_PLACE & schema.keys()
            if key == "unevaluatedProperties" and is_alone and "additionalProperties" not in schema:
                kept["additionalProperties"] = self._schema(value)
            elif not (
                (key == "uniqueItems" and value is False)
                or (key == "propertyNames" and (value in (True, {}) or self._of_names(schema)))
                or key in ("$dynamicAnchor", "$recursiveAnchor")
            ):
                self.wider.add(key)

    def _loosen(self, schema: dict[str, Any], kept: dict[str, Any], parts: list[Any]) -> None:
        """Omit keywords that the library can rarely combine with others."""
        dropped = {"minProperties", "maxProperties"} & kept.keys()
        if len(schema.get("patternProperties") or ()) > 1:
            dropped |= {"patternProperties", "additionalProperties"} & kept.keys()
        if "$ref" in kept:
            dropped |= kept.keys() - {"$ref"} - _ANNOTATIONS
            parts.clear()
            self.wider |= _EXPANDED & schema.keys()
        for key in dropped:
            del kept[key]
        self.wider |= dropped

    def _reference(self, target: Any) -> Any:
        """Return a reference to the rewritten target, whose location may differ."""
        if target == "#" or self._target(target) is None:
            return target
        if target not in self._names:
            self._names[target] = f"r{len(self._names)}"
            self._unwritten.append(target)
        return f"#/$defs/{self._names[target]}"

    def _target(self, reference: Any) -> Any:
        """Return the subschema of a reference into this document, or None."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        place = self._root
        for part in unquote(reference[2:]).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
                place = place[int(name)]
            elif isinstance(place, dict) and name in place:
                place = place[name]
            else:
                return None
        return place if isinstance(place, dict | bool) else None

    def _count(self) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise TooLarge


_EXPANDED = frozenset(
    {"oneOf", "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"}
)


def _any_of(schemas: list[Any]) -> Any:
    possible = [schema for schema in schemas if schema is not False]
    return {"anyOf": possible} if possible else False


def _both(first: Any, second: Any) -> Any:
    return first if second is True else second if first is True else {"allOf": [first, second]}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
