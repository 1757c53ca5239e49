"""`pagemill doctor --plan`, as users type it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pagemill.__main__ import app
from tests.sizing.test_plan import LLAMA_8B

CPU = ("--cpu-gb-per-s", "20", "--cpu-gflops", "200")
LENGTHS = ("--prompt-tokens", "500", "--output-tokens", "100")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["doctor", "--plan", *words], prog_name="pagemill")


def test_a_card_needs_no_card(model: str) -> None:
    result = invoke("--model", model, "--device", "h100", *LENGTHS, "--rate", "20", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert set(document) == {"model", "device", "load", "plan", "assumptions"}
    assert document["device"]["name"] == "h100"
    assert document["model"]["parameters"] == 8_030_261_248
    assert document["plan"]["workers"] >= 1
    assert document["load"]["kept_jobs"] == 20 * 86_400
    assert any("data sheet" in line for line in document["assumptions"])


def test_lines_for_people(model: str) -> None:
    rows = ("--rows", "1000000", "--deadline", "7200")
    result = invoke("--model", model, "--device", "a100", *LENGTHS, *rows, "--max-num-seqs", "64")
    assert result.exit_code == 0, result.stderr
    lines = dict(line.split("\t")[:2] for line in result.stdout.splitlines())
    assert list(lines) == [
        "model", "KV blocks", "rows", "a worker", "workers", "a job", "Redis memory", "Redis CPU", "assumed",
    ]  # fmt: skip
    assert lines["rows"] == "64"


@pytest.mark.slow
def test_a_cpu_is_measured_or_given() -> None:
    common = ("--model", "smollm2", *LENGTHS, "--rate", "0.5", "--json")
    measured = json.loads(invoke(*common).stdout)
    assert "measured now" in measured["device"]["source"]
    given = json.loads(invoke(*common, *CPU).stdout)
    assert given["device"]["source"] == "as given"
    assert given["device"]["bytes_per_s"] == 20e9
    assert given["model"]["weight_bits"] < 8, "the packaged model's weights are packed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs --model"),
        (("--model", "MODEL"), "needs --model, --prompt-tokens, --output-tokens"),
        (("--model", "MODEL", *LENGTHS), "--rate JOBS_PER_SECOND, or --rows"),
        (("--model", "MODEL", *LENGTHS, "--rate", "1", "--rows", "5"), "--rate JOBS_PER_SECOND, or --rows"),
        (("--model", "MODEL", *LENGTHS, "--rows", "5"), "--deadline"),
        (("--model", "MODEL", *LENGTHS, "--rate", "1", "--device", "tpu"), "'cpu', 'h200', 'h100'"),
        (
            ("--model", "MODEL", *LENGTHS, "--rate", "1", "--device", "l4", "--dtype", "float32"),
            "larger device",
        ),
        (("--model", "MODEL", *LENGTHS, "--rate", "1", "--dtype", "int3"), "dtype"),
        (("--model", "/no/such/model", *LENGTHS, "--rate", "1"), "/no/such/model"),
        (("--model", "echo", *LENGTHS, "--rate", "1"), "echo is not a model"),
    ],
)
def test_what_can_not_be_planned_is_told(words: tuple[str, ...], message: str, model: str) -> None:
    result = invoke(*(model if word == "MODEL" else word for word in words))
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
