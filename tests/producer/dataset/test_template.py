"""Templates: what they may do, and that a row they fail on fails alone."""

from __future__ import annotations

import pytest

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.recipe import Recipe
from pagemill.producer.dataset.tables.rows import Row, RowError
from pagemill.producer.dataset.template import PromptTemplate, TemplateFailed
from pagemill.producer.wire.schema.job import Job


def test_columns_and_filters() -> None:
    template = PromptTemplate(
        "{{ text | trim }} {{ row['odd name'] }} {% for t in tags %}<{{ t }}>{% endfor %}"
    )
    fields = {"text": " a<b ", "odd name": 1, "tags": ["x", "y"]}
    assert template.render(fields) == "a<b 1 <x><y>"


def test_json_keeps_its_letters() -> None:
    assert PromptTemplate("{{ row | tojson }}").render({"a": "é"}) == '{"a": "é"}'


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ row.__class__ }}",
        "{{ row.update({'a': 1}) }}",
        "{{ row['missing'] }}",
        "{{ missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ 'x' * 100000000 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ text.nope() }}",
    ],
)
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
