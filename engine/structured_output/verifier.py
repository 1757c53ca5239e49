"""Checks finished outputs with `jsonschema`, if a grammar allows more than its schema.

Runs only in the schema's process: a pattern may take unbounded time in Python's `re`, and an alarm ends the process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import referencing
from jsonschema import Draft7Validator, Draft202012Validator, FormatChecker, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for

from pagemill.common.schema_rewriting import PATTERN_TOKEN, VERIFIED_FORMATS
from pagemill.engine.errors import SchemaMismatch, UnsupportedFeature

_MAX_REASON = 200
_OLD, _NEW = Draft7Validator.VALIDATORS, Draft202012Validator.VALIDATORS
_LATER = (
    "const",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Keywords missing in the first drafts."""
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_SET_SYNTAX = re.compile(r"\[|&&|--|~~")
_BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
"""Keywords whose form in draft 4 prepared schemas do not have."""


class Verifier:
    """A schema for checking complete outputs. References are followed only within the schema."""

    def __init__(self, text: str) -> None:
        """Prepare for a schema.

        Args:
            text: the schema, as `prepared_text` returns it.

        Raises:
            UnsupportedFeature: the schema cannot be checked this way.
        """
        schema = json.loads(text)
        for pattern in _patterns(schema):
            if not _is_readable(pattern):
                raise UnsupportedFeature(
                    "structured_outputs.json: outputs of this schema have to be verified, and Python can't read its "
                    f"pattern {pattern[:_MAX_REASON]!r}"
                )
        base: Any = validator_for(schema, default=Draft202012Validator)
        # Keywords of other drafts apply as well: clients that write them intend them.
        more = {name: _NEW[name] for name in _LATER}
        more["dependencies"] = _OLD["dependencies"]
        as_grammars = {
            "additionalItems": _additional_items,
            "items": _items,
            "multipleOf": _multiple_of,
            **{name: _NEW[name] for name in _BOUNDS},
        }
        every: Any = extend(base, {**more, **base.VALIDATORS, **as_grammars})
        if isinstance(schema, dict):
            schema.pop("$schema", None)  # by it, a reference to the root would select another validator
        self._validator: Validator = every(
            schema, registry=referencing.Registry(), format_checker=FormatChecker(VERIFIED_FORMATS)
        )

    def check(self, output: bytes) -> None:
        """Raise SchemaMismatch unless the schema allows the output."""
        try:
            error = next(self._validator.iter_errors(json.loads(output)), None)
        except (
            Exception
        ) as raised:  # numbers and nesting beyond Python's limits; references that have no target
            raise SchemaMismatch(_message(type(raised).__name__, "the output can't be verified")) from None
        if error is not None:
            raise SchemaMismatch(
                _message(
                    "/".join(map(str, error.absolute_schema_path)),
                    "the grammar allows more than the schema, and the output does not match it",
                )
            )


def _items(validator: Any, items: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    """Accept a list of schemas in any draft."""
    keywords = _OLD if isinstance(items, list) else _NEW
    yield from keywords["items"](validator, items, value, schema)


def _additional_items(validator: Any, items: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(schema.get("items"), list):
        yield from _OLD["additionalItems"](validator, items, value, schema)


def _multiple_of(validator: Validator, divisor: float, value: Any, _schema: Any) -> Iterator[ValidationError]:
    """Compare decimals, as grammars do: 0.29 is not a multiple of 0.01 in binary."""
    if validator.is_type(value, "number") and Fraction(repr(value)) % Fraction(repr(divisor)):
        yield ValidationError("not a multiple")


def _message(place: str, reason: str) -> str:
    return f"structured_outputs.json: {reason}: {place[:_MAX_REASON]}"


def _is_readable(pattern: str) -> bool:
    """Return True if Python reads a pattern as grammars do, which have operators and nested classes in classes."""
    if any(
        token[0] == "[" and _SET_SYNTAX.search(_ESCAPE.sub("", token[1:]))
        for token in PATTERN_TOKEN.findall(pattern)
    ):
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _patterns(schema: Any) -> Iterator[str]:
    """Yield all potential patterns, at any depth."""
    if isinstance(schema, list):
        for part in schema:
            yield from _patterns(part)
    elif isinstance(schema, dict):
        if isinstance(pattern := schema.get("pattern"), str):
            yield pattern
        if isinstance(several := schema.get("patternProperties"), dict):
            yield from several
        for part in schema.values():
            yield from _patterns(part)
