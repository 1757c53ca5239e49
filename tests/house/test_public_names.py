"""`import pagemill` is light, and all of its public names exist."""

from __future__ import annotations

import pytest

import pagemill
from pagemill import LLM, Job, SamplingParams, StructuredOutputs
from tests.conftest import run_python

HEAVY = ("torch", "transformers", "triton", "numba", "numpy", "typer", "rich", "jinja2", "celery", "yaml")


def loaded(code: str, *names: str) -> list[str]:
    """The modules of this set that a process has loaded after it ran some code."""
    program = f"import sys\n{code}\nprint(*(name for name in {names} if name in sys.modules))"
    done = run_python("-c", program, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("package", ["pagemill", "pagemill.producer"])
def test_importing_it_loads_nothing_of_others(package: str) -> None:
    assert loaded(f"import {package}", "redis", "pydantic", *HEAVY) == []


@pytest.mark.parametrize(
    "package",
    ["pagemill.producer.wire", "pagemill.monitoring.counters", "pagemill.monitoring.metrics.exporter"],
)
def test_the_light_side_loads_nothing_heavy(package: str) -> None:
    heavy = (
        "torch", "transformers", "triton", "numba", "numpy", "pagemill.engine.execution", "pagemill.worker",
    )  # fmt: skip
    assert loaded(f"import {package}", *heavy) == []


@pytest.mark.slow
def test_a_producer_loads_redis_and_pydantic_and_nothing_heavy() -> None:
    code = """
from pagemill import AsyncProducer, InvalidJob, Job, Producer, StructuredOutputs
Producer("redis://127.0.0.1:1"), AsyncProducer("redis://127.0.0.1:1"), Job, StructuredOutputs(regex="a")
"""
    ours = tuple(f"pagemill.{part}" for part in ("engine", "kernels", "worker", "monitoring"))
    assert loaded(code, "redis", *HEAVY, *ours) == ["redis"]


def test_public_names_are_there() -> None:
    for name in pagemill.__all__:
        assert getattr(pagemill, name).__name__ == name
    assert set(pagemill.__all__) <= set(dir(pagemill))


def test_a_name_that_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Prodcuer'"):
        pagemill.Prodcuer  # noqa: B018


def test_prompts_in_outputs_out() -> None:
    """The example that vLLM's users know, except for the name of the import."""
    prompts = ["Hello, my name is", "The capital of France is"]
    outputs = LLM(model="echo").generate(prompts, SamplingParams(temperature=0.8, top_p=0.95), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert prompt.startswith(output.outputs[0].text)


@pytest.mark.slow
def test_a_producers_install_says_what_a_model_needs() -> None:
    code = """
sys.modules["torch"] = None
from pagemill import LLM, ConfigError
try:
    LLM("smollm2")
except ConfigError as error:
    assert "pip install 'pagemill[worker]'" in str(error), error
else:
    raise AssertionError
"""
    assert loaded(code) == []


def test_one_structure_serves_a_job_and_a_prompt() -> None:
    shape = StructuredOutputs(choice=("yes", "no"))
    assert Job(prompt="a", model="echo", structured_outputs=shape).structured_outputs == shape
    params = SamplingParams(structured_outputs=shape, max_tokens=8)
    (output,) = LLM(model="echo").generate("Is it?", params, use_tqdm=False)
    assert output.outputs[0].text in shape.choice
