"""Templates: their permitted operations, and that an error in one row fails only that row."""

from __future__ import annotations

import pytest

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.recipe import Recipe
from pagemill.producer.dataset.tables.rows import Row, RowError
from pagemill.producer.dataset.template import Condition, PromptTemplate, TemplateFailed
from pagemill.producer.wire.schema.job import Job


def test_columns_and_filters() -> None:
    template = PromptTemplate(
        "{{ text | trim }} {{ row['odd name'] }} {% for t in tags %}<{{ t }}>{% endfor %}"
    )
    fields = {"text": " a<b ", "odd name": 1, "tags": ["x", "y"]}
    assert template.render(fields) == "a<b 1 <x><y>"


def test_json_keeps_its_letters() -> None:
    assert PromptTemplate("{{ row | tojson }}").render({"a": "é"}) == '{"a": "é"}'


METHODS = sorted(name for name in dir(dict) if not name.startswith("_"))


@pytest.mark.parametrize("name", [*METHODS, "title", "append", "real"])
def test_a_field_is_found_before_an_attribute(name: str) -> None:
    """An object's field may have the same name as a Python method."""
    fields = {"order": {name: ["apple", "pear"]}}
    for source in (
        "{{ order.NAME | join(' ') }}",
        "{{ row.order.NAME | join(' ') }}",
        "{{ order.NAME.0 }} {{ order['NAME'].1 }}",
        "{% for each in order.NAME %}{{ each }}{{ ' ' if not loop.last }}{% endfor %}",
        "{% macro listed(one) %}{{ one.NAME | join(' ') }}{% endmacro %}{{ listed(order) }}",
        "{{ [order] | map(attribute='NAME') | first | join(' ') }}",
        "{% for _, each in order.items() %}{{ each | join(' ') }}{% endfor %}",
    ):
        assert PromptTemplate(source.replace("NAME", name)).render(fields) == "apple pear"
    assert Condition(f"order.{name} | length == 2").holds(fields)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "source", ["{{ o.NAME }}", "{{ o.NAME ~ '' }}", "{{ o.NAME | string }}", "{{ [o.NAME] }}"]
)
def test_a_method_is_not_printed(name: str, source: str) -> None:
    with pytest.raises(TemplateFailed):
        PromptTemplate(source.replace("NAME", name)).render({"o": {"a": 1}})


@pytest.mark.parametrize(
    "source",
    [
        "{{ text.upper }}", "{{ tags.index }}", "{{ n.bit_length }}", "{{ tags | map('upper') }}", "{{ lipsum }}",
        "{{ self }}", "{{ namespace }}", "{{ o | attr('get') }}", "{% for t in tags %}{{ loop }}{% endfor %}",
        "{{ [o.nope] }}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("nulls_are_empty", [False, True])
def test_only_values_are_printed(source: str, nulls_are_empty: bool) -> None:
    template = PromptTemplate(source, nulls_are_empty=nulls_are_empty)
    with pytest.raises(TemplateFailed):
        template.render({"text": "x", "tags": ["a", "b"], "n": 1, "o": {"a": 1}})


def test_a_missing_field_has_a_default() -> None:
    assert PromptTemplate("{{ o.items | default('none') }}").render({"o": {}}) == "none"
    assert PromptTemplate("{{ 'y' if o.items is defined else 'n' }}").render({"o": {}}) == "n"


def test_row_is_the_whole_row_also_with_a_column_of_that_name() -> None:
    fields = {"row": 7, "odd name": "x"}
    template = PromptTemplate('{{ row["odd name"] }} {{ row["row"] }} {{ row.row }}')
    template.check_columns(fields)
    assert template.render(fields) == "x 7 7"
    for source in ("{{ row }}", "{{ row | trim }}", "{% for name in row %}{{ name }}{% endfor %}"):
        with pytest.raises(DatasetError, match="whole row"):
            PromptTemplate(source).check_columns(fields)
        PromptTemplate(source).check_columns({"text": "x"})
    with pytest.raises(DatasetError, match="whole row"):
        Condition("row > 3").check_columns(fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ row.__class__ }}", "{{ row.update({'a': 1}) }}",
        "{{ row['missing'] }}", "{{ missing.deeper }}", "{{ 1 / 0 }}", "{{ 'x' * 100000000 }}",
        "{% for i in range(1000000000) %}x{% endfor %}", "{{ text.nope() }}",
    ],
)  # fmt: skip
def test_what_goes_wrong_is_the_rows_own(source: str) -> None:
    with pytest.raises(TemplateFailed):
        PromptTemplate(source).render({"text": "x"})


@pytest.mark.parametrize(
    "source", ["{{ text", "{% if %}", "{{ text | no_such_filter }}", "{% include 'x' %}{{"]
)
def test_what_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(DatasetError):
        PromptTemplate(source)


def test_a_recipe_makes_chats() -> None:
    recipe = Recipe("m", "Say {{ text }}", "Be {{ mood }}", fields={"temperature": 0.0})
    job = recipe.job(Row(1, {"text": "hi", "mood": "kind"}))
    assert isinstance(job, Job)
    assert [(m.role, m.content) for m in job.messages or ()] == [("system", "Be kind"), ("user", "Say hi")]


def test_a_recipe_without_a_template_takes_the_prompt_columns() -> None:
    recipe = Recipe("m", chat=False)
    plain = recipe.job(Row(1, {"prompt": "hi"}))
    chat = recipe.job(Row(1, {"messages": '[{"role": "user", "content": "hi"}]'}))
    assert isinstance(plain, Job)
    assert isinstance(chat, Job)
    assert plain.prompt == "hi"
    assert chat.messages is not None


def test_bad_rows_become_errors() -> None:
    recipe = Recipe("m", "{{ text }}", chat=False)
    bad = [{"text": ""}, {"other": 1}, {"text": "x" * 2_000_000}]
    errors = [recipe.job(Row(1, fields)) for fields in bad]
    assert all(isinstance(error, RowError) for error in errors)
    assert [error.code for error in errors if isinstance(error, RowError)] == [
        "empty_row", "template_error", "template_error",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "match"),
    [
        (Recipe("m", "{{ nope }}"), "the columns are: text"),
        (Recipe("m"), "the prompt is missing"),
        (Recipe("m", "{{ text }}", fields={"temperature": -1.0}), "temperature"),
        (Recipe("m", "{{ text }}", fields={"no_such_field": 1}), "no_such_field"),
        (Recipe("m", "{{ text }}", "sys", chat=False), "chat"),
    ],
)
def test_a_recipe_that_no_row_can_succeed_with_is_refused(recipe: Recipe, match: str) -> None:
    with pytest.raises(DatasetError, match=match):
        recipe.check(Row(1, {"text": "x"}))
