"""`pagemill worker --served-model-name`: one name or several, written as for vLLM."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pagemill.__main__ import app
from pagemill.cli.processes import worker as worker_command
from pagemill.engine.llm import LLM
from pagemill.worker.config import WorkerConfig

FLAG = "--served-model-name"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    """The configurations with which workers would have started."""
    configs: list[WorkerConfig] = []
    monkeypatch.setattr(worker_command, "_run", lambda config: configs.append(config) or 0)
    return configs


@pytest.mark.parametrize(
    "words",
    [
        [FLAG, "org/a", "b", "--max-num-seqs", "7", "--model", "echo"],
        ["--model", "echo", "--max-num-seqs", "7", FLAG, "org/a", "b"],
        ["--model=echo", "--max-num-seqs=7", f"{FLAG}=org/a", "b"],
        ["--model", "echo", "--max-num-seqs", "7", FLAG, "org/a", FLAG, "b"],
        ["--model", "echo", "--max-num-seqs", "7", FLAG, "org/a,b,org/a"],
        ["--model", "echo", "--max-num-seqs", "7", "--option", "served_model_name=org/a b"],
    ],
)
def test_several_names(words: list[str], started: list[WorkerConfig]) -> None:
    result = CliRunner().invoke(app, ["worker", *words])
    assert result.exit_code == 0, result.output
    (config,) = started
    assert config.engine.served_model_name == ("org/a", "b")
    assert (config.engine.model, config.engine.max_num_seqs) == ("echo", 7)


def test_names_from_the_environment(started: list[WorkerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_SERVED_MODEL_NAME", "a b,c")
    assert CliRunner().invoke(app, ["worker", "--model", "echo"]).exit_code == 0
    assert started[0].engine.served_model_name == ("a", "b", "c")


def test_a_flag_without_a_name_is_refused(started: list[WorkerConfig]) -> None:
    result = CliRunner().invoke(app, ["worker", FLAG, "--model", "echo"])
    assert (result.exit_code, started) == (2, [])
    assert FLAG in result.stderr


def test_other_words_are_refused_as_ever(started: list[WorkerConfig]) -> None:
    result = CliRunner().invoke(app, ["worker", "--model", "echo", "astray"])
    assert (result.exit_code, started) == (2, [])


def test_an_llm_has_names_too() -> None:
    assert LLM(model="echo").engine.served_models == ("echo",)
    assert LLM(model="echo", served_model_name=["a", "b", "a"]).engine.served_models == ("a", "b")
