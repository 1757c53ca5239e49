"""lm-evaluation-harness: its results through the gateway equal its results with transformers."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.dense import dense_smollm2
from tests.conftest import ROOT
from tests.integration.conformance.environments import outside, python_with
from tests.producer.gateway.serving import gateway
from tests.worker.harness import running_worker, worker_config

PINNED = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
)
PACKAGES = (
    "lm-eval[api]==0.4.13", f"torch=={PINNED['torch']}", f"transformers=={PINNED['transformers']}", "accelerate",
)  # fmt: skip
QUESTIONS = [
    {"question": f"The capital of {country} is", "choices": capitals, "answer": index % 4}
    for capitals in [["Rome", "Paris", "Madrid", "Oslo"]]
    for index, country in enumerate(["Italy", "France", "Spain", "Norway"] * 3)
]
TEXTS = [
    {"text": "The lighthouse keeper wrote down the weather every evening, even when nobody asked for it."},
    {"text": "Naïve visitors asked for coffee in the café; everybody else brought their own.\n\nWhy?"},
    {"text": "x"},
]
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "capitals": (QUESTIONS, {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "num_fewshot": 2, "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }),
    "prose": (TEXTS, {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }),
    "continued": (TEXTS[:2], {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }),
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the tasks, on local rows: no data set is downloaded."""
    for name, (rows, task) in TASKS.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        head = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(head | {"test_split": "test"} | task))
    return tmp_path


def evaluate(python: Path, tasks: Path, kind: str, /, **arguments: object) -> dict[str, list[Any]]:
    """Return the responses of a kind of model to every request, by task."""
    output = tasks / kind
    done = subprocess.run(
        [
            python, "-m", "lm_eval", "run", "--model", kind, "--tasks", *TASKS, "--include_path", tasks,
            "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--output_path", output, "--log_samples", "--device", "cpu",
        ],
        env=outside() | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks / "hub"), "OPENAI_API_KEY": "none"},
        cwd=tasks, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in TASKS:
        (path,) = output.rglob(f"samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        found[name] = [response for sample in samples for response in sample["filtered_resps"]]
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_results_equal_those_of_transformers(
    valkey_url: str, pytestconfig: pytest.Config, tasks: Path
) -> None:
    python = python_with(pytestconfig, *PACKAGES)
    directory = dense_smollm2()
    expected = evaluate(python, tasks, "hf", pretrained=directory, dtype="float32")
    queue = f"q-{uuid.uuid4().hex[:12]}"
    with (
        running_worker(worker_config(valkey_url, queue, model="smollm2", dtype="float32")),
        gateway(valkey_url, queue) as served,
    ):
        served.wait_for("smollm2")
        found = evaluate(
            python, tasks, "local-completions", model="smollm2", base_url=f"{served.base_url}/completions",
            tokenizer=directory, tokenizer_backend="huggingface", tokenized_requests=True, num_concurrent=4,
        )  # fmt: skip
    assert found["continued"] == expected["continued"]
    for name in ("capitals", "prose"):
        for own, reference in zip(found[name], expected[name], strict=True):
            own, reference = [one if isinstance(one, list) else [one] for one in (own, reference)]
            assert float(own[0]) == pytest.approx(float(reference[0]), abs=1e-4, rel=1e-4)
            assert own[1:] == reference[1:], "whether a continuation is the greedy one"
