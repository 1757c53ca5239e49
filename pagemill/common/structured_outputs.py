"""The required shape of an output, for producers and engines."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pagemill.common.bounds import Exact, InvalidParameter, Length
from pagemill.common.json_values import NestedTooDeep, check_json

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

MAX_CHOICES = 1024
MAX_STRING = 4096
"""Maximum number of characters in one stop string, bad word or choice."""
MAX_SCHEMA = 65_536
"""Maximum number of characters in a regex or grammar, and in the parameters of a tool."""
MAX_JSON_SCHEMA = 262_144
"""Maximum number of characters in a JSON schema."""
MAX_SCHEMA_DEPTH = 64
"""Maximum nesting of objects and arrays in a JSON schema."""

ShortText = Annotated[str, Exact(), Length(1, MAX_STRING)]


class _SchemaObject:
    """Accepts a JSON schema as an object or a pydantic class, too."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": schema_text},
            "schema": handler(source),
        }


def is_model(value: Any) -> bool:
    """Return whether this is a pydantic class, which describes its own JSON schema."""
    return isinstance(value, type) and callable(getattr(value, "model_json_schema", None))


_SCHEMA_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMA_PLACES = ("items", "additionalProperties")
_CONDITIONS = frozenset({"if", "dependentSchemas", "unevaluatedProperties"})
_BESIDE_PROPERTIES = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


def closed_objects(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in each object that lists properties and leaves this open.

    JSON Schema allows further properties by default. A small model then invents properties until it reaches its
    token limit. Pydantic writes `additionalProperties: true` for `extra="allow"`, which stays. A schema that composes
    an object of several parts is returned unchanged, since each part would reject the properties of the others.
    """
    return schema if _is_composed(schema) else _closed(schema)


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in _SCHEMA_MAPS:
        yield from parts.values() if isinstance(parts := schema.get(key), dict) else ()
    for key in _SCHEMA_LISTS:
        yield from parts if isinstance(parts := schema.get(key), list) else ()
    for key in _SCHEMA_PLACES:
        yield schema.get(key)


def _is_composed(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    several = schema.get("allOf")
    return bool(
        _CONDITIONS & schema.keys()
        or (isinstance(several, list) and len(several) > 1)
        or ("properties" in schema and _BESIDE_PROPERTIES & schema.keys())
        or any(map(_is_composed, _parts(schema)))
    )


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            closed[key] = {name: _closed(part) for name, part in value.items()}
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            closed[key] = [_closed(part) for part in value]
        elif key in _SCHEMA_PLACES:
            closed[key] = _closed(value)
    required, properties = schema.get("required", ()), schema.get("properties")
    # Required properties that are not listed must remain allowed.
    if (
        isinstance(properties, dict)
        and isinstance(required, list | tuple)
        and properties.keys() >= set(required)
    ):
        closed.setdefault("additionalProperties", False)
    return closed


def schema_text(schema: Any) -> Any:
    """Return an object, true, false or a pydantic class as a schema's JSON text; anything else unchanged.

    Objects of a pydantic class are closed unless it has `extra="allow"` (`closed_objects`).
    Raises InvalidParameter.
    """
    if is_model(schema):
        try:
            schema = closed_objects(schema.model_json_schema())
        except Exception as error:  # pydantic's own, for a field that has no JSON form
            reason = str(error).partition("\n")[0]
            raise InvalidParameter(
                f"json: {schema.__name__} has no JSON schema: {reason}", "schema_invalid"
            ) from None
    if not isinstance(schema, dict | bool):
        return schema
    try:
        return json_format.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise _too_deep() from None
    except (TypeError, ValueError):
        raise InvalidParameter("json: is not JSON", "schema_invalid") from None


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The shape of an output; exactly one field is set.

    `choice`: one of these strings. `regex`: a text that matches as a whole. `json`: a value that a JSON schema
    allows; the schema is text, or the object itself or a pydantic class, which become text. `grammar`: what a
    grammar in Lark's syntax or in GBNF derives. Only the engine interprets schemas. Raises
    InvalidParameter.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "hide_input_in_errors": True}

    choice: Annotated[tuple[ShortText, ...], Length(1, MAX_CHOICES)] | None = None
    regex: Annotated[str, Exact()] | None = None
    json: Annotated[Annotated[str, Exact()] | None, _SchemaObject()] = None
    grammar: Annotated[str, Exact()] | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(given) != 1:
            raise InvalidParameter("exactly one of choice, regex, json, grammar is required")
        (kind,) = given
        if kind == "choice":
            self._check_choice()
            return
        if kind == "json":
            object.__setattr__(self, "json", schema_text(self.json))
        text = getattr(self, kind)
        if not isinstance(text, str) or not text:
            raise InvalidParameter(f"{kind}: must be a text, and not an empty one")
        limit = MAX_JSON_SCHEMA if kind == "json" else MAX_SCHEMA
        if len(text) > limit:
            raise InvalidParameter(f"{kind}: has more than {limit} characters", "schema_too_complex")
        if kind == "json":
            _check_schema(text)

    @classmethod
    def from_shape(cls, shape: StructuredOutputs | Mapping[str, Any] | type[Any]) -> StructuredOutputs:
        """Create structured outputs from any form that a job accepts.

        Args:
            shape: a StructuredOutputs, a mapping of its fields, or a pydantic class.

        Returns:
            The structured outputs.

        Raises:
            InvalidParameter: the shape has another form or is invalid.
        """
        if isinstance(shape, cls):
            return shape
        if is_model(shape):
            return cls(json=shape)  # type: ignore[arg-type]
        try:
            return cls(**shape)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidParameter(
                "should be a StructuredOutputs, a mapping with one of choice, regex, json, grammar, or a pydantic class"
            ) from None

    def _check_choice(self) -> None:
        labels = self.choice
        if (
            isinstance(labels, str)
            or not labels
            or not all(isinstance(label, str) and label for label in labels)
        ):
            raise InvalidParameter("choice: needs at least one label, none of them empty")
        object.__setattr__(self, "choice", tuple(labels))


def _check_schema(text: str) -> None:
    try:
        schema = json_format.loads(text)
        check_json(schema, MAX_SCHEMA_DEPTH)
        text.encode()
    except (RecursionError, NestedTooDeep):
        raise _too_deep() from None
    except ValueError:
        raise InvalidParameter("json: is not JSON", "schema_invalid") from None
    if not isinstance(schema, dict | bool):
        raise InvalidParameter("json: a schema is an object, true or false", "schema_invalid")


def _too_deep() -> InvalidParameter:
    return InvalidParameter(
        f"json: nests more than {MAX_SCHEMA_DEPTH} objects and arrays", "schema_too_complex"
    )
