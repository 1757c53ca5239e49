"""JSON schemas with keywords that the grammar library lacks: they are rewritten, and outputs are verified."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.common.schema_disjointness import Disjointness
from pagemill.common.schema_preparation import POSIX_CLASSES, prepared_text
from pagemill.common.schema_rewriting import MAX_NODES, TooLarge, rewritten
from pagemill.common.structured_outputs import MAX_JSON_SCHEMA, StructuredOutputs
from pagemill.engine.errors import InvalidRequest, SchemaInvalid, SchemaMismatch, UnsupportedFeature
from pagemill.engine.structured_output.matcher import CompiledSchema, compile_schema
from pagemill.engine.structured_output.verifier import Verifier
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary
from pagemill.engine.text.tokenizer import ByteTokenizer

EOS = 256
VOCABULARY = GrammarVocabulary.from_tokenizer(ByteTokenizer(), 264, (EOS,))
assert VOCABULARY is not None
TOKENIZER = VOCABULARY.build()
Schema = Any

KIND = {"type": "string", "enum": ["a", "b", "c"]}
BRANCH = {"required": ["kind"], "properties": {"kind": {"const": "a"}}}
OTHER = {"required": ["kind"], "properties": {"kind": {"const": "b"}}}
OBJECT = {
    "type": "object",
    "properties": {"kind": KIND, "x": {"type": "integer"}, "y": {"type": "integer"}},
    "additionalProperties": False,
}
VALUES: list[Any] = [
    {}, {"kind": "a"}, {"kind": "b"}, {"kind": "a", "x": 1}, {"kind": "b", "y": 2}, {"x": 1}, {"y": 1},
    {"x": "s"}, {"x": 1, "y": 2}, {"kind": "c", "x": 1, "y": 2}, [],
    [1, 1], [1, 2], [1, 2, 2], 1, 5, 12, -1, "a", "b", "abc",
    "", True, False, None, ".", "-", "+.", "1.5", "-0.50", ".5", "1.", "1a", "+1", "b]", "1.55",
]  # fmt: skip
EXACT: dict[str, Schema] = {
    "oneOf of disjoint types": {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    "oneOf of tagged objects": OBJECT | {"oneOf": [BRANCH, OTHER]},
    "oneOf of references": {
        "$defs": {"A": OBJECT | BRANCH, "B": OBJECT | OTHER},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    },
    "oneOf of closed objects": {
        "oneOf": [
            {"type": "object", "properties": {n: {"type": "integer"}}, "required": [n], "additionalProperties": False}
            for n in ("x", "y")
        ]
    },
    "not a type": {"not": {"type": ["object", "array"]}},
    "not a value": KIND | {"not": {"const": "b"}},
    "not a boolean": {"type": "boolean", "not": {"enum": [True]}},
    "not required": OBJECT | {"not": {"required": ["x"]}},
    "not both required": OBJECT | {"not": {"required": ["x", "y"]}},
    "not anyOf": OBJECT | {"not": {"anyOf": [{"required": ["x"]}, {"required": ["y"]}]}},
    "not a value of a property": OBJECT | {"not": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]}},
    "not not": {"not": {"not": {"type": "integer"}}},
    "not longer": {"type": "string", "not": {"minLength": 2}},
    "not less": {"type": "integer", "not": {"maximum": 4}},
    "not shorter": {"type": "array", "items": {"type": "integer"}, "not": {"maxItems": 1}},
    "if then else": OBJECT | {"if": BRANCH, "then": {"required": ["x"]}, "else": {"required": ["y"]}},
    "if then": OBJECT | {"if": {"required": ["x"]}, "then": {"required": ["kind"]}},
    "dependencies": OBJECT | {"dependencies": {"x": ["kind"]}, "$schema": "http://json-schema.org/draft-07/schema#"},
    "dependentRequired": OBJECT | {"dependentRequired": {"x": ["y"], "y": ["kind"]}},
    "dependentSchemas": OBJECT | {"dependentSchemas": {"x": {"required": ["kind"]}}},
    "unevaluatedProperties": {k: v for k, v in OBJECT.items() if k != "additionalProperties"}
    | {"unevaluatedProperties": False},
    "names of a list": {"type": "object", "propertyNames": {"enum": ["x", "y", 1]}},
    "names of a reference": {
        "$defs": {"Name": {"enum": ["x", "y"], "type": "string", "title": "Name"}},
        "type": "object", "propertyNames": {"$ref": "#/$defs/Name"}, "additionalProperties": {"type": "integer"},
    },
    "names among properties": OBJECT | {"propertyNames": {"enum": ["x", "z"]}},
    "names of a length": {"type": "object", "propertyNames": {"type": "string", "maxLength": 1}},
    "names of a pattern": {"propertyNames": {"pattern": "^[xz]"}, "additionalProperties": {"type": "integer"}},
    "a decimal": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    "not only a class": {"type": "string", "pattern": r"^(?![ab\]]*$)[a-z]*$"},
    "no unique items": {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
}  # fmt: skip
VERIFIED: dict[str, Schema] = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"const": 2}},
    "names of two rules": {"type": "object", "propertyNames": {"maxLength": 1, "pattern": "[xy]"}},
    "names of their own rule": {"type": "object", "propertyNames": {"anyOf": [{"const": "x"}, {"maxLength": 1}]}},
    "names beside patterns": {"type": "object", "patternProperties": {"x": True}, "propertyNames": {"maxLength": 1}},
    "a look-ahead": {"type": "string", "pattern": "^(?=.*b)[a-c]+$"},
    "a negative look-ahead": {"type": "string", "pattern": r"^(?!ab)[a-c\d]+"},
    "a decimal of few digits": {
        "type": "string",
        "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,1}|(?=[\d.]{1,3}0*$)\d{0,1}\.\d{0,2}0*)$",
    },
    "not only some characters": {"type": "string", "pattern": r"^(?![ab\]]+$)[a-z(\])]*$"},
    "a look-behind": {"type": "string", "pattern": r"^[a-c]+(?<!b)$"},
    "overlapping oneOf": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 7}]},
    "oneOf of required": OBJECT | {"oneOf": [{"required": ["x"]}, {"required": ["y"]}]},
    "not a pattern": {"type": "string", "not": {"pattern": "^a"}},
    "not an integer": {"not": {"type": "integer"}},
    "if a pattern": {"type": "string", "if": {"pattern": "^a"}, "then": {"minLength": 2}},
    "unevaluatedProperties beside anyOf": {
        "type": "object",
        "anyOf": [{"properties": {"x": True}, "required": ["x"]}, {"properties": {"kind": True}}],
        "unevaluatedProperties": False,
    },
    "patternProperties that overlap": {"type": "object", "patternProperties": {"x": {}, "[xy]": {"type": "integer"}}},
}  # fmt: skip


def compiled(schema: Schema) -> CompiledSchema:
    return compile_schema(TOKENIZER, "json", json.dumps(schema))


def verdict(schema: CompiledSchema, value: Any) -> str:
    """Return whether a value is accepted, rejected by the grammar, or rejected once it is complete."""
    grammar, data = schema.start(), json.dumps(value).encode()
    position = 0
    while position < len(data) and not grammar.is_complete:
        if not _allows(grammar.token_mask(), data[position]):
            return "refused"
        forced = bytes(token for token in grammar.advance(data[position]) if token != EOS)
        position += 1
        if data[position : position + len(forced)] != forced:
            return "refused"
        position += len(forced)
    if position < len(data) or not (grammar.is_complete or _allows(grammar.token_mask(), EOS)):
        return "refused"
    try:
        if schema.verifier is not None:
            schema.verifier.check(data)
    except SchemaMismatch:
        return "mismatch"
    return "accepted"


def _allows(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def is_valid(schema: Schema, value: Any) -> bool:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema).is_valid(value))


@pytest.mark.parametrize("name", EXACT)
def test_rewritten_grammars_allow_the_values_of_their_schemas_and_no_others(name: str) -> None:
    schema = compiled(EXACT[name])
    assert schema.warnings == ()
    for value in VALUES:
        expected = "accepted" if is_valid(EXACT[name], value) else "refused"
        assert verdict(schema, value) == expected, value
    assert len({is_valid(EXACT[name], value) for value in VALUES}) == 2, "the values show a difference"


@pytest.mark.parametrize("name", VERIFIED)
def test_outputs_of_wider_grammars_are_verified(name: str) -> None:
    schema = compiled(VERIFIED[name])
    (warning,) = schema.warnings
    assert "verified at its end" in warning
    verdicts = [(is_valid(VERIFIED[name], value), verdict(schema, value)) for value in VALUES]
    assert (False, "mismatch") in verdicts
    assert {seen for is_right, seen in verdicts if is_right} == {"accepted"}
    assert (False, "accepted") not in verdicts


def beside_unique(schema: Schema) -> CompiledSchema:
    """Compile a schema for pairs, whose outputs are verified because the second element is a set."""
    unique = {"type": "array", "uniqueItems": True}
    return compiled({"type": "array", "prefixItems": [schema, unique], "items": False, "minItems": 2})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "multipleOf": 0.01}, [0.29, 0.57, 1.15, 4.35, 19.99, 0, 3, 10**20], [0.295]),
        ({"type": "number", "multipleOf": 0.1}, [0.3, 0.7, -0.3], [0.35]),
        ({"type": "string", "pattern": "^[[:alpha:]]+$"}, ["abc"], ["a:", "1", ""]),
        ({"type": "string", "pattern": r"^[^_\][:digit:]]$"}, ["a", "["], ["1", "_", "]"]),
        (
            {"patternProperties": {"^[[:lower:]]$": {"type": "null"}}, "additionalProperties": False},
            [{"a": None}],
            [{"A": None}, {":": None}],
        ),
        ({"type": "number", "maximum": 100, "exclusiveMaximum": False}, [-1, 0, 5, 100], [100.5]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True}, [0.1, 1], [0, -1]),
        ({"type": "number", "minimum": 5, "exclusiveMinimum": True, "maximum": 5.5}, [5.1, 5.5], [5]),
        (
            {"type": "array", "items": [{"type": "integer"}, KIND]},
            [[], [1], [1, "a"], [1, "a", 2]],
            [["a"], [1, "d"]],
        ),
        ({"type": "array", "items": [KIND], "additionalItems": False}, [["a"]], [["a", "a"]]),
        (
            {"type": "array", "items": [KIND], "additionalItems": {"type": "null"}},
            [["a", None]],
            [["a", "a"]],
        ),
    ],
)
def test_values_that_the_grammar_allows_are_verified_alike(
    schema: Schema, good: list[Any], bad: list[Any]
) -> None:
    pair = beside_unique(schema)
    assert {str(value): verdict(pair, [value, []]) for value in good} == dict.fromkeys(
        map(str, good), "accepted"
    )
    assert {verdict(pair, [value, []]) for value in bad} == {"refused"}
    assert verdict(pair, [good[0], [1, 1]]) == "mismatch"
    verifier = Verifier(prepared_text(json.dumps(schema)))
    for value in bad:
        with pytest.raises(SchemaMismatch):
            verifier.check(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("json-pointer", ["", "/a/b~1"], ["a", "/~2"]),
        ("relative-json-pointer", ["0", "1/a", "0#"], ["01", "a"]),
        ("uri-reference", ["a/b", "//h:80/a", "http://x.y/z?a=b#c"], ["a b", "%zz", "1:a"]),
        ("iri-reference", ["/a"], ["a b"]),
        ("uri-template", ["http://e.com/{a,b}", "{+x:3}"], ["{", "{}"]),
        ("iri", ["http://a.b/"], ["a b"]),
        ("idn-email", ["a@b.cd"], ["a"]),
        ("idn-hostname", ["a.b"], ["a b"]),
        ("regex", ["a+"], ["("]),
    ],
)
def test_standard_formats_are_enforced(name: str, good: list[str], bad: list[str]) -> None:
    schema = compiled({"type": "string", "format": name})
    assert all(verdict(schema, value) == "accepted" for value in good)
    assert not any(verdict(schema, value) == "accepted" for value in bad)


def test_unknown_formats_are_annotations() -> None:
    schema = compiled({"type": "array", "items": {"type": "string", "format": "color"}})
    assert verdict(schema, ["red", ""]) == "accepted"
    assert schema.warnings == (
        "structured_outputs.json: the format 'color' is not supported and was not checked",
    )
    assert compiled({"type": "integer", "format": "int64"}).warnings == ()


def test_supported_schemas_are_neither_rewritten_nor_verified() -> None:
    schema = compiled(OBJECT)
    assert (schema.verifier, schema.warnings) == (None, ())


@pytest.mark.parametrize("more", [{"format": "password"}, {"not": {"type": "null"}}])
def test_outputs_of_equivalent_grammars_are_not_verified(more: Schema) -> None:
    schema = compiled({"type": "string", "pattern": "^[[:alpha:]]+$", **more})
    assert schema.verifier is None
    assert verdict(schema, "abc") == "accepted"
    assert verdict(schema, "a1") == "refused"


@pytest.mark.parametrize(
    "properties",
    [
        {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "object", "required": False}},
        {"a": {"type": "string", "format": "password"}, "b": {"type": "string", "pattern": None}},
    ],
)
def test_the_error_of_a_schema_is_that_of_its_last_rewriting(properties: Schema) -> None:
    with pytest.raises(SchemaInvalid, match=r"'(required|pattern)'"):
        compiled({"type": "object", "properties": properties})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["a"], [1]),
        ({"type": ["string", "null"]}, ["a"], [1]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, [1], [0]),
        ({"type": "string", "enum": ["a"]}, ["a"], ["b"]),
        ({"enum": ["a", None]}, ["a"], ["b"]),
        ({"const": "a"}, ["a"], ["b"]),
        ({"type": "string", "format": "uuid"}, [], ["b"]),
        (OBJECT, [{"x": 1}], [{"z": 1}]),
        ({"$defs": {"K": KIND}, "$ref": "#/$defs/K"}, ["a"], ["d"]),
        ({"$defs": {"K": KIND}, "allOf": [{"$ref": "#/$defs/K"}]}, ["a"], ["d"]),
        ({"oneOf": [{"type": "string"}, {"type": "boolean"}]}, ["a", True], [1]),
        (
            {"type": "array", "uniqueItems": True, "items": {"type": "string", "nullable": True}},
            [["a", None]],
            [[1]],
        ),
    ],
)
@pytest.mark.parametrize("where", ["root", "item"])
def test_nullable_schemas_allow_null(where: str, schema: Schema, good: list[Any], bad: list[Any]) -> None:
    for is_nullable in (True, False):
        nullable = schema | {"nullable": is_nullable}
        if where == "item":
            defs = {"$defs": schema.get("$defs", {})}
            part = {key: value for key, value in nullable.items() if key != "$defs"}
            nullable = {"type": "array", "items": part, "minItems": 1, "maxItems": 1, **defs}
        grammar = compiled(nullable)
        as_written = [[value] if where == "item" else value for value in (None, *good, *bad)]
        seen = [verdict(grammar, value) == "accepted" for value in as_written]
        has_null = is_nullable or is_valid(schema, None)
        assert seen == [has_null, *[True] * len(good), *[False] * len(bad)]


def test_references_lead_to_rewritten_targets() -> None:
    tree = {
        "type": "object",
        "properties": {
            "value": {"type": "integer", "not": {"minimum": 9}},
            "next": {"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/value"}]},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    schema = compiled(tree)
    assert verdict(schema, {"value": 1, "next": {"value": 2, "next": 3}}) == "accepted"
    assert verdict(schema, {"value": 1, "next": {"value": 2, "next": 9}}) == "refused"


@pytest.mark.parametrize(
    ("name", "fragment"),
    [
        ("Page[Item]", "Page[Item]"),
        ("Map<string, Item>", "Map<string, Item>"),
        ("Größe", "Größe"),
        ("a/b~c|", "a~1b~0c|"),
        ("100% {x}", "100% {x}"),
        ("Page[Item]", "Page%5BItem%5D"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"not": {"const": "d"}}, {"uniqueItems": True}])
def test_names_of_definitions_may_have_any_characters(name: str, fragment: str, more: Schema) -> None:
    schema = compiled({"$defs": {name: KIND}, "allOf": [{"$ref": f"#/$defs/{fragment}"}], **more})
    assert verdict(schema, "a") == "accepted"
    assert verdict(schema, "d") == "refused"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "minItems": 1.0, "maxItems": 2e0}, [1], []),
        ({"type": "string", "minLength": 1.0, "maxLength": 3.0}, "a", "abcd"),
        ({"type": "object", "minProperties": 1.0, "maxProperties": 2.0}, {"a": 1}, {}),
        ({"type": "array", "contains": {"const": 1}, "minContains": 2.0}, [1, 1], [1]),
    ],
)
def test_counts_may_be_written_as_floats(schema: Schema, good: Any, bad: Any) -> None:
    grammar = compiled(schema)
    assert verdict(grammar, good) == "accepted"
    assert verdict(grammar, bad) != "accepted"


def test_a_long_chain_of_definitions_is_followed() -> None:
    names = [f"d{number}" for number in range(2_000)]
    definitions = {
        name: {"type": "array", "items": {"$ref": f"#/$defs/{after}"}, "maxItems": 1}
        for name, after in zip(names, [*names[1:], names[0]], strict=True)
    }
    text = json.dumps({"$ref": "#/$defs/d0", "$defs": definitions, "not": {"type": "string"}})
    assert len(json.loads(rewritten(text, is_loose=False).text)["$defs"]) == len(names)


@pytest.mark.parametrize("reference", ["http://127.0.0.1:9/x", "file:///etc/passwd", "#/$defs/none"])
def test_references_outside_the_schema_are_refused_and_never_fetched(reference: str) -> None:
    with pytest.raises(InvalidRequest):
        compiled({"$ref": reference, "not": {"type": "string"}})
    with pytest.raises(SchemaMismatch, match="can't be verified"):
        Verifier(json.dumps({"$ref": reference})).check(b"1")


@pytest.mark.parametrize("output", [b"[" * 100_000 + b"]" * 100_000, b"9" * 5_000, b"\xff", b"{"])
def test_outputs_that_cannot_be_read_are_mismatches(output: bytes) -> None:
    with pytest.raises(SchemaMismatch, match="can't be verified"):
        Verifier(json.dumps(VERIFIED["not an integer"])).check(output)


@pytest.mark.parametrize("pattern", [r"^\p{L}+$", "^[a-z&&[^aeiou]]+$", "^[a[bc]]$"])
def test_a_schema_that_can_be_neither_enforced_nor_verified_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedFeature, match="Python can't read its pattern"):
        compiled({"type": "string", "pattern": pattern, "not": {"pattern": "^a"}})


@pytest.mark.parametrize("name", POSIX_CLASSES)
def test_posix_classes_have_the_same_characters_for_grammars(name: str) -> None:
    regex = compile_schema(TOKENIZER, "regex", f"[[:{name}:]]")
    mask = regex.start().token_mask()
    mine = re.compile(f"[{POSIX_CLASSES[name]}]")
    assert [_allows(mask, byte) for byte in range(128)] == [
        bool(mine.match(chr(byte))) for byte in range(128)
    ]


@pytest.mark.parametrize(
    "draft",
    [
        "draft-04/schema#",
        "draft-06/schema#",
        "draft-07/schema#",
        "draft/2019-09/schema",
        "draft/2020-12/schema",
    ],
)
def test_references_to_the_root_are_verified_alike_in_each_draft(draft: str) -> None:
    tree = {
        "$schema": f"http{'s' * ('/20' in draft)}://json-schema.org/{draft}",
        "type": "array",
        "items": [{"type": "number", "multipleOf": 0.01}, {"$ref": "#"}],
        "uniqueItems": True,
    }
    schema = compiled(tree)
    assert verdict(schema, [0.29, [0.57, [4.35]]]) == "accepted"
    assert verdict(schema, [0.295]) == "refused"
    assert verdict(schema, [0.29, [1, [], 1]]) == "mismatch"


def test_a_rewritten_schema_is_bounded() -> None:
    with pytest.raises(TooLarge):
        rewritten(json.dumps({"anyOf": [{"not": {"type": "string"}}] * (MAX_NODES + 1)}), is_loose=False)
    several = [{"required": [f"p{number}"], "type": "object"} for number in range(2_000)]
    assert not Disjointness(lambda _: None, MAX_NODES).of_all(several)


def test_a_json_schema_may_be_longer_than_a_regex() -> None:
    long = {"type": "string", "description": "x" * 200_000}
    text = StructuredOutputs(json=json.dumps(long)).json
    assert text is not None
    compile_schema(TOKENIZER, "json", text)
    with pytest.raises(Exception, match=f"more than {MAX_JSON_SCHEMA} characters"):
        StructuredOutputs(json=json.dumps({"description": "x" * MAX_JSON_SCHEMA}))


_names = st.sampled_from("abc")
_scalars = st.sampled_from([None, True, False, 0, 1, 2, 7, "", "a", "ab", "b"])
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=6,
)
_leaves = st.one_of(
    st.sampled_from(["null", "boolean", "object", "array", "string", "number", "integer"]).map(
        lambda name: {"type": name}
    ),
    _scalars.map(lambda value: {"const": value}),
    st.lists(_scalars, min_size=1, max_size=3, unique_by=repr).map(lambda values: {"enum": values}),
    st.integers(0, 3).flatmap(
        lambda limit: st.sampled_from(
            [{"minLength": limit}, {"maxLength": limit}, {"minimum": limit}, {"maximum": limit}, {"maxItems": limit}]
        )
    ),
    st.lists(_names, max_size=2, unique=True).map(lambda names: {"required": names}),
    st.just({"type": "array", "uniqueItems": True}),
    st.booleans(),
)  # fmt: skip


def _composed(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(inner, min_size=1, max_size=3)
    members = {
        "not": inner,
        "oneOf": several,
        "anyOf": several,
        "allOf": several,
        "if": inner,
        "then": inner,
        "else": inner,
        "properties": st.dictionaries(_names, inner, max_size=2),
        "additionalProperties": inner,
        "items": inner,
        "contains": inner,
        "dependentRequired": st.dictionaries(_names, st.lists(_names, max_size=2, unique=True), max_size=2),
        "dependentSchemas": st.dictionaries(_names, inner, max_size=2),
        "type": st.sampled_from(["object", "array", "string", "integer"]),
    }
    keys = st.lists(st.sampled_from(sorted(members)), min_size=1, max_size=3, unique=True)
    return keys.flatmap(lambda names: st.fixed_dictionaries({name: members[name] for name in names}))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    schema=st.recursive(_leaves, _composed, max_leaves=6), values=st.lists(_values, min_size=1, max_size=6)
)
def test_all_that_is_accepted_is_valid(schema: Schema, values: list[Any]) -> None:
    try:
        grammar = compiled(schema)
    except InvalidRequest:
        return
    for value in values:
        if verdict(grammar, value) == "accepted":
            assert is_valid(schema, value)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    first=st.recursive(_leaves, _composed, max_leaves=5),
    second=st.recursive(_leaves, _composed, max_leaves=5),
    values=st.lists(_values, min_size=1, max_size=8),
)
def test_no_value_matches_two_disjoint_schemas(first: Schema, second: Schema, values: list[Any]) -> None:
    if Disjointness(lambda _: None, MAX_NODES).of(first, second):
        assert not any(is_valid(first, value) and is_valid(second, value) for value in values)
