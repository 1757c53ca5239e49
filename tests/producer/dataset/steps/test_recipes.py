"""Recipes as they are read: errors with their line numbers, before any job is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.output_places import StepPlace, fill
from pagemill.producer.dataset.pipeline import RecipePipeline
from pagemill.producer.dataset.steps.recipe_file import read_recipe
from pagemill.producer.dataset.steps.walk import is_met
from pagemill.producer.wire.schema.dependencies import Condition
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.templates import ParentOutput

GOOD = """\
model: m
defaults:
  max_tokens: 32
steps:
  - name: label
    prompt: "{{ text }}?"
    choices: [a, b]
    label_probs: product
  - name: why
    prompt: |
      {{ text }} is
      {{ label.text }}.
    when: {label: {label: a, prob_at_least: 0.8}}
    examples:
      - {text: x, label: a, output: y}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_a_recipe_is_read(tmp_path: Path) -> None:
    label, why = read_recipe(written(tmp_path, GOOD)).steps
    assert (label.after, why.after) == ((), ("label",))
    assert why.when == {"label": Condition(label="a", prob_at_least=0.8)}
    assert (why.recipe.model, why.recipe.fields["max_tokens"], why.column) == ("m", 32, "why")
    assert label.columns == {"label": "", "label_prob": "probability", "label_probs": ""}


def test_steps_are_put_in_an_order_that_works_and_columns_stay_distinct(tmp_path: Path) -> None:
    text = """
steps:
  - {name: c, prompt: "{{ b.parsed.title }} {{ a.label }}"}
  - {name: a, prompt: x}
  - {name: d, prompt: y, after: c}
  - {name: b, prompt: "{{ a.text }}", json_schema: {type: object}}
"""
    assert [step.name for step in read_recipe(written(tmp_path, text)).steps] == ["a", "b", "c", "d"]


def test_examples_come_from_a_file_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "shots.csv").write_text("text,output\nq,r\ns,t\n")
    text = "steps: [{name: a, prompt: '{{ text }}', examples: shots.csv}]"
    (step,) = read_recipe(written(tmp_path, text)).steps
    assert step.recipe.examples == ({"text": "q", "output": "r"}, {"text": "s", "output": "t"})


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("model: m", "modle: m", 1, "the recipe: unknown key 'modle'; did you mean model?"),
        ("  max_tokens: 32", "  max_token: 32", 3, "defaults: unknown key 'max_token'; did you mean max_tokens?"),
        ("    choices", "    choises", 7, "step label: unknown key 'choises'; did you mean choices?"),
        ("    prompt: \"{{ text }}?\"\n", "", 5, "step label has no prompt"),
        ("{{ text }}?", "{{ text }?", 6, "step label: the template's line 1"),
        ("{{ text }}?", "{{ why.text }}?", 5, "steps wait for each other: label waits for why waits for label"),
        ("{{ text }}?", "{{ label.text }}?", 5, "label waits for label"),
        ("{{ label.text }}", "{{ label }}", 10, "label is a step, whose output is not known"),
        ("{{ label.text }}", "{{ label.text | upper }}", 10, "print it as it is"),
        ("{{ label.text }}", "{% if label.text == 'a' %}x{% endif %}", 10, "`when` decides what runs"),
        ("{{ label.text }}", "{{ label.txt }}", 10, "text, label, label_prob and parsed, not txt"),
        ("when: {label:", "when: {labl:", 13, "unknown step labl; the other steps are label"),
        ("prob_at_least: 0.8", "prob_at_least: 8", 13, "step why: when: label.prob_at_least"),
        ("prob_at_least: 0.8", "prob_atleast: 0.8", 13, "label.prob_atleast"),
        ("    label_probs: product\n", "", 12, "label has no probability: give it choices, and label_probs"),
        ("name: why", "name: label", 9, "two steps are called label"),
        ("name: why", "name: a b", 9, "its name is a word of letters"),
        ("name: why", "name: why\n    column: label_prob", 10, "another step has a column label_prob too"),
        ("name: why", "name: why\n    after: [nobody]", 10, "after lists other steps: label"),
        ("name: why", "name: why\n    task: embed", 10, "unknown key 'task'"),
        ("name: why", "name: why\n    n: 3", 10, "unknown key 'n'"),
        ("name: why", "name: why\n    max_tokens: many", 9, "these settings make no job: max_tokens"),
        ("name: why", "name: why\n    model: no model!", 9, "these settings make no job: model"),
        ("name: why", "name: why\n    chat: false", 9, "examples need a template, and the chat form"),
        ("output: y", "outptu: y", 9, "example 1 has no output"),
        ("{text: x, label: a, output: y}", "{txt: x, label: a, output: y}", 9, "example 1: the row lacks"),
        ("{text: x, label: a, output: y}", "nothing", 14, "examples are a list of rows"),
        ("choices: [a, b]", "choices: [a, b]\n    regex: a", 8, "give one of choices, regex"),
        ("steps:\n", "steps: []\nmore:\n", 5, "the recipe: unknown key 'more'"),
        ("  max_tokens: 32", "  max_tokens: 32\n  max_tokens: 16", 4, "max_tokens is there twice"),
        ("model: m", "model: [m", 2, "expected"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(
    old: str, new: str, line: int, says: str, tmp_path: Path
) -> None:
    assert GOOD.count(old) >= 1
    with pytest.raises(DatasetError) as told:
        read_recipe(written(tmp_path, GOOD.replace(old, new, 1)))
    assert says in str(told.value)
    assert f"recipe.yaml, line {line}: " in str(told.value)


@pytest.mark.parametrize("text", ["", "- a", "steps: 3", "steps: [3]", "steps: [{name: a}]", "defaults: 3"])
def test_other_yaml_is_no_recipe(text: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"recipe\.yaml, line 1: "):
        read_recipe(written(tmp_path, text))


@pytest.mark.parametrize(
    ("recipe", "options", "says"),
    [
        (
            {"prompt": "{{ summry.text }}"},
            {},
            "step a: the template asks for summry; the columns are: text, a_b",
        ),
        ({"prompt": "{{ a_b }}", "name": "text"}, {}, "text is a column and a step"),
        ({"prompt": "{{ text }}", "column": "a_b"}, {}, "the input has a column 'a_b' already"),
        ({"prompt": "{{ text }}", "gold": "side"}, {}, "unknown column 'side'"),
        ({"prompt": "{{ text }}"}, {"gold": "text"}, "gold is not for a recipe"),
        ({"prompt": "{{ text }}"}, {"escalate_below": 0.5, "to": "m"}, "escalate_below is not for a recipe"),
        ({"prompt": "{{ text.x }}"}, {}, "none of the 2 rows makes a job"),
    ],
)
def test_what_the_rows_do_not_have_is_refused_before_anything_is_submitted(
    recipe: dict[str, Any], options: dict[str, Any], says: str, valkey_url: str, queue_name: str, tmp_path: Path
) -> None:  # fmt: skip
    given = [{"text": "x", "a_b": 1}, {"text": "y", "a_b": 2}]
    with Producer(valkey_url, queue=queue_name, model="m") as producer:
        with pytest.raises(DatasetError, match=says):
            RecipePipeline({"steps": [{"name": "a", **recipe}]}).run(
                given, out=tmp_path / "out.jsonl", producer=producer, **options
            )
        assert not list(producer.batches())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("condition", "text", "label", "prob", "holds"),
    [
        ({"label": "a"}, " a\n", None, None, True),
        ({"label": ["b", "a"]}, "x", "a", 0.5, True),
        ({"label": "a"}, "a", "b", 0.5, False),
        ({"text": "a"}, "a", "b", 0.5, True),
        ({"prob_at_least": 0.5}, "a", "a", 0.5, True),
        ({"prob_at_least": 0.5}, "a", None, None, False),
        ({"prob_below": 0.5}, "a", "a", 0.5, False),
        ({"label": "a", "prob_below": 0.5}, "a", "a", 0.4, True),
    ],
)
def test_conditions_hold_as_in_the_queue(
    condition: dict[str, Any], text: str, label: str | None, prob: float | None, holds: bool
) -> None:
    given = ParentOutput(id="p", state="succeeded", text=text, label=label, prob=prob)
    assert is_met(Condition(**condition), given) is holds


def test_known_outputs_are_put_in_and_never_read_again() -> None:
    mark = {name: StepPlace(name) for name in ("a", "b")}
    text = f"{mark['a'].text} {mark['b'].parsed.x} {{b.text}}"
    known = {"a": ParentOutput(id="a", state="succeeded", text="{b.text}")}
    assert fill(text, known, is_waiting=True) == "{{b.text}} {b.parsed.x} {{b.text}}"
    known["b"] = ParentOutput(id="b", state="succeeded", text=json.dumps({"x": [1]}))
    assert fill(text, known, is_waiting=False) == "{b.text} [1] {b.text}"
    with pytest.raises(InvalidJob, match="braces on both sides"):
        fill(f"{{{mark['a'].text}}}", {}, is_waiting=True)
    with pytest.raises(InvalidJob, match="no label_prob"):
        fill(str(mark["a"].label_prob), known, is_waiting=False)
