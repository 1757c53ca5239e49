"""The required shape of an output, for producers and engines."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pagemill.bounds import Exact, InvalidParameter, Length
from pagemill.json_values import NestedTooDeep, check_json

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

MAX_CHOICES = 1024
MAX_STRING = 4096
"""Most characters in one stop string, bad word or choice."""
MAX_SCHEMA = 65_536
"""Most characters in a regex, JSON schema or grammar."""
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


def schema_text(schema: Any) -> Any:
    """Return an object, true, false or a pydantic class as a schema's JSON text; anything else unchanged.

    Raises InvalidParameter.
    """
    if is_model(schema):
        try:
            schema = schema.model_json_schema()
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
    grammar in Lark's syntax or in GBNF derives. What a schema means only the engine can tell. Raises
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
            raise InvalidParameter("give exactly one of choice, regex, json, grammar")
        (kind,) = given
        if kind == "choice":
            self._check_choice()
            return
        if kind == "json":
            object.__setattr__(self, "json", schema_text(self.json))
        text = getattr(self, kind)
        if not isinstance(text, str) or not text:
            raise InvalidParameter(f"{kind}: must be a text, and not an empty one")
        if len(text) > MAX_SCHEMA:
            raise InvalidParameter(f"{kind}: has more than {MAX_SCHEMA} characters", "schema_too_complex")
        if kind == "json":
            _check_schema(text)

    @classmethod
    def of(cls, shape: StructuredOutputs | Mapping[str, Any] | type[Any]) -> StructuredOutputs:
        """Return the shape, or one made from its fields or a pydantic class. Raises InvalidParameter."""
        if isinstance(shape, cls):
            return shape
        if is_model(shape):
            return cls(json=shape)  # type: ignore[arg-type]
        try:
            return cls(**shape)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidParameter(
                "give a StructuredOutputs, a mapping with one of choice, regex, json, grammar, or a pydantic class"
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
