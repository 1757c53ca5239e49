"""Numbers of JSON schemas that the grammar library would round, or include against the schema."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.common.schema_preparation import prepared_schema
from pagemill.engine.errors import UnsupportedFeature
from pagemill.engine.structured_output.matcher import CompiledSchema
from tests.engine.structured_output.test_rewritten import compiled

BOUNDS = [Decimal(text) for text in ("-5.5", "-5", "-1", "-0.05", "0", "0.05", "0.5", "1", "5", "5.5", "10")]
FARTHEST = 2**63 - 1024


def allows(schema: CompiledSchema, text: str) -> bool:
    matcher = schema.matcher.deep_copy()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@given(st.sampled_from(BOUNDS), st.sampled_from(BOUNDS), st.booleans(), st.booleans())
def test_no_number_is_outside_of_its_bounds(
    one: Decimal, other: Decimal, low_is: bool, high_is: bool
) -> None:
    low, high = sorted((one, other))
    if high == low:
        return
    lower, upper = ("exclusiveMinimum", "minimum")[low_is], ("exclusiveMaximum", "maximum")[high_is]
    schema = compiled({"type": "number", lower: float(low), upper: float(high)})
    for text in ("-0", "0", *map(str, BOUNDS)):
        number = Decimal(text)
        is_inside = low < number < high or (number == low and low_is) or (number == high and high_is)
        assert is_inside or not allows(schema, text), text
    between = str((low * 7 + high) / 8)
    assert allows(schema, between)


def test_integers_keep_their_exclusive_bounds() -> None:
    schema = compiled({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3})
    assert [number for number in range(-1, 5) if allows(schema, str(number))] == [1, 2]


@pytest.mark.parametrize(
    ("given_bounds", "inside", "outside"),
    [
        ({"minimum": 2**53 + 1}, [2**53 + 2, 2**60], [2**53, 2**53 + 1]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [-FARTHEST, 0, FARTHEST], [2**63, -(2**63) - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, FARTHEST], [-1, 2**64]),
        ({"maximum": 10**400}, [0], []),
    ],
)
def test_bounds_that_no_float_holds_move_inwards(
    given_bounds: dict[str, int], inside: list[int], outside: list[int]
) -> None:
    schema = compiled({"type": "integer"} | given_bounds)
    assert all(allows(schema, str(number)) for number in inside)
    assert not any(allows(schema, str(number)) for number in outside)


def test_the_range_of_a_float_is_supported() -> None:
    schema = compiled({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38})
    assert allows(schema, "-1.5")


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a", 2**60 + 1]},
        {"const": {"id": [2**60 + 1]}},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
        {"properties": {"id": {"const": 10**400}}},
    ],
)
def test_integers_that_cannot_be_enforced_are_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedFeature, match=r"beyond 2\*\*53, .*use a string"):
        compiled(schema)


def test_a_range_that_is_too_far_away_is_refused() -> None:
    with pytest.raises(UnsupportedFeature):
        compiled({"type": "number", "minimum": 1e20})


def test_data_and_names_of_properties_are_not_schemas() -> None:
    schema = {
        "properties": {"const": {"exclusiveMinimum": 5, "maximum": 5.5}, "minimum": {"const": 2**60}},
        "const": {"exclusiveMinimum": 5, "maximum": 5.5},
        "default": {"enum": [2**60 + 1]},
        "minimum": 0,
    }
    changed = prepared_schema(schema)
    assert changed["properties"]["const"] == {"minimum": 5.00000000000001, "maximum": 5.5}
    assert changed | {"properties": schema["properties"]} == schema
