"""The types of what `submit` and `Pipeline` take; `python -m` with this module's name writes them anew."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from pagemill import InvalidJob, Job, Message, StructuredOutputs
from pagemill.producer.client import job_fields
from pagemill.producer.wire.schema.dependencies import Condition
from pagemill.producer.wire.schema.text.chat import NamedToolChoice, Tool
from tests.conftest import ROOT

OF_A_ROW = (
    "prompt", "messages", "prompt_token_ids", "model", "temperature", "after", "when", "on_parent_failure",
)  # fmt: skip
"""The arguments that `Pipeline` sets itself, or reads from a row."""
WIDER = {
    "stop": "str | Sequence[str]",
    "bad_words": "str | Sequence[str]",
    "structured_outputs": "StructuredOutputs | Mapping[str, Any] | type[Any] | None",
    "response_format": "Mapping[str, Any] | type[Any] | None",
    "after": "str | HasId | Sequence[str | HasId] | Mapping[str, str | HasId] | None",
}
HEAD = '''"""The fields of a job as keyword arguments: written from `Job`, so that a type checker knows them.

Rewritten by `python -m tests.producer.client.test_job_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.producer.client.images import Image
from pagemill.producer.wire.schema.dependencies import Condition, HasId
from pagemill.producer.wire.schema.text.chat import Message, NamedToolChoice, Tool


class RowFields(TypedDict, total=False):
    """Fields that a `Pipeline` sets for every row; `Job` describes each."""

'''
MIDDLE = '''

class JobFields(RowFields, total=False):
    """Fields that `submit` takes instead of a `Job`."""

    images: Image | Sequence[Image] | None
    """Pictures before the prompt, or before the text of the last user's message."""
'''


def spelled(hint: Any) -> str:
    """An annotation as the type of its accepted values."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(map(spelled, arguments))
    if origin is Literal:
        return f"Literal[{', '.join(repr(value) for value in arguments)}]".replace("'", '"')
    if origin is tuple:
        return f"Sequence[{spelled(arguments[0])}]"
    if origin in (dict, Mapping):
        return f"Mapping[{', '.join(map(spelled, arguments))}]"
    if hint in (Condition, Message, NamedToolChoice, StructuredOutputs, Tool):
        return f"{hint.__name__} | Mapping[str, Any]"
    return {type(None): "None", Any: "Any"}.get(hint) or str(hint.__name__)


def written() -> str:
    hints = get_type_hints(Job)
    lines = {name: WIDER.get(name) or spelled(hints[name]) for name in (*Job.model_fields, "response_format")}
    common = [f"    {name}: {kind}\n" for name, kind in lines.items() if name not in OF_A_ROW]
    own = [f"    {name}: {lines[name]}\n" for name in OF_A_ROW]
    return "".join([HEAD, *common, MIDDLE, *own])


def test_they_are_those_of_a_job() -> None:
    assert job_fields.__file__ is not None
    assert Path(job_fields.__file__).read_text() == written(), __doc__


PROGRAM = """
from pagemill import AsyncProducer, Producer, StructuredOutputs
from pagemill.producer.dataset.pipeline import Pipeline

def right(queue: Producer) -> None:
    queue.submit(prompt="a", model="m", stop="b", structured_outputs={"choice": ["a", "b"]}, max_tokens=None)
    queue.submit(messages=[{"role": "user", "content": "a"}], model="m", on_full="block")
    queue.submit({"prompt": "a", "model": "m"}, tenant="t")
    queue.submit_many([{"prompt": "a", "model": "m"}])
    first = queue.submit(prompt="a", model="m")
    queue.submit(prompt="{parent.text}", model="m", after=[first], when={"parent": {"label": "yes"}})
    Pipeline("{{ text }}", model="m", max_tokens=4, structured_outputs=StructuredOutputs(regex="a"))

async def wrong(queue: Producer, other: AsyncProducer) -> None:
    queue.submit(promt="a", model="m")
    queue.submit(prompt="a", model="m", temperature="hot")
    await other.submit(prompt="a", model="m", max_token=3)
    Pipeline("{{ text }}", model="m", max_token=4)
    queue.submit(prompt="a", model="m", priority="urgent")
    queue.submit(prompt="a", model="m", after=[3])
"""


@pytest.mark.slow
def test_a_type_checker_finds_a_wrong_field(tmp_path: Path) -> None:
    program = (tmp_path / "program").with_suffix(".py")
    program.write_text(PROGRAM)
    # Strict by pyproject.toml, and with the cache that `make lint` has just filled.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(program)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    # mypy's cache has the folder of an earlier run.
    wrong = re.findall(r"^.*/program\.py:(\d+): error", done.stdout, re.MULTILINE)
    first = PROGRAM[: PROGRAM.index("    queue.submit(promt=")].count("\n") + 1
    assert [int(line) for line in wrong] == list(range(first, first + 6)), done.stdout


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"promt": "a"}, "promt: no such field; did you mean prompt?"),
        ({"prompt": "a", "max_token": 3}, "max_token: no such field; did you mean max_tokens?"),
        ({"prompt": "a", "zzzz": 3}, "zzzz: no such field"),
        (
            {"messages": [{"role": "user", "contents": "a"}]},
            "messages.0.contents: no such field; did you mean content?",
        ),
        (
            {"prompt": "a", "structured_outputs": {"choices": ["a"]}},
            "structured_outputs.choices: no such field; did you mean choice?",
        ),
        (
            {"prompt": "a", "tools": [{"function": {"name": "f", "paramters": {}}}]},
            "tools.0.function.paramters: no such field; did you mean parameters?",
        ),
    ],
)
def test_an_unknown_field_is_told_its_neighbour(fields: dict[str, Any], hint: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        Job.parse({"model": "m"} | fields)
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        (
            {"tools": [{"name": "f", "function": {"name": "f"}}]},
            "tools.0.name: no such field",
            "tools.0.name",
        ),
        (
            {"metadta": {}, "role": "x"},
            "metadta: no such field; did you mean metadata?; role: no such field",
            None,
        ),
        (
            {"tool_choice": "maybe"},
            "tool_choice: Input should be 'none', 'auto' or 'required'; tool_choice: Input should be a valid object",
            "tool_choice",
        ),
        (
            {"tool_choice": {"type": "function", "custom": 1, "function": {"name": "f"}}},
            "tool_choice.custom: no such field",
            "tool_choice.custom",
        ),
        (
            {"continuations": [[-1]], "task": "score"},
            "continuations.0.0: Input should be greater than or equal to 0",
            "continuations.0.0",
        ),
        (
            {"logit_bias": {"a": 1}},
            "logit_bias.a: Input should be a valid integer, unable to parse string as an integer",
            "logit_bias.a",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_places_name_no_types_and_hints_name_fields_of_the_place(
    fields: dict[str, Any], message: str, param: str | None
) -> None:
    with pytest.raises(InvalidJob) as refused:
        Job.parse({"model": "m", "prompt": "a"} | fields)
    assert (str(refused.value), refused.value.param) == (message, param or next(iter(fields)))


if __name__ == "__main__":
    Path(job_fields.__file__ or "").write_text(written())
