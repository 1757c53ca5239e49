"""The same jobs on the packaged model, with its engine on a thread and in a separate process: the same results."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel

from pagemill import Producer
from pagemill.worker.worker import Worker
from tests.engine.pooling.tiny_pooling import ENCODERS, engine_of, run, save_base
from tests.worker.harness import get, running_worker, worker_config

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "Name a color."}]
SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3}
BRIEF: dict[str, Any] = {"prompt": "The sky is", "max_tokens": 12, "seed": 7}
JOBS: dict[str, dict[str, Any]] = {
    "log-probabilities": BRIEF | {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    "samples": BRIEF | {"temperature": 1.0, "n": 2, "stop": [" of"], "bad_words": ["blue"]},
    "chat": {"messages": QUESTION, "temperature": 0.0, "max_tokens": 12},
    "schema": {"messages": QUESTION, "structured_outputs": {"json": SCHEMA}, "max_tokens": 40, "seed": 7},
    "labels": {
        "prompt": "Good or bad?", "structured_outputs": {"choice": [" good", " bad"]}, "label_probs": "product",
    },
    "score": {"task": "score", "prompt": "The sky", "continuations": [" is blue", " falls"], "logprobs": 2},
    "beams": BRIEF | {"beam_width": 2, "n": 2, "temperature": 0.0},
}  # fmt: skip
COUNTED = (
    r"^pagemill_(?:prompt_tokens_total|generated_tokens_total|engine_requests_finished_total"
    r"|request_structured|kv_block_allocations_total|grammar\w*_(?:total|count))\S* \S+"
)
VARIES = {"id", "seed", "timing", "usage_s", "worker", "created_at", "finished_at"}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "embedder"
    save_base(directory, ENCODERS["bert"], AutoModel)
    return directory


def results(url: str, where: str) -> tuple[dict[str, Any], str]:
    """Each job's result without the values that differ between runs, then the text of the metrics."""
    config = worker_config(
        url, f"same-{where}", model="smollm2", num_kv_blocks=128, num_threads=1, engine_process=where
    )
    with running_worker(config) as worker, Producer(url, queue=f"same-{where}") as producer:
        found = {}
        for name, job in JOBS.items():  # sequentially: the batch of a step is the same then
            result = producer.submit(model="smollm2", **job).result(timeout=120)
            found[name] = result.model_dump(mode="json", exclude=VARIES)
        return found, settled_metrics(worker)


def settled_metrics(worker: Worker) -> str:
    """The metrics once the counts are final: a process reports its counts after the result."""
    text, before = "", None
    while before is None or re.findall(COUNTED, text, re.MULTILINE) != before:
        before = re.findall(COUNTED, text, re.MULTILINE)
        time.sleep(0.5)
        text = get(f"{worker.http_url}/metrics")[1].decode()
    return text


@pytest.fixture(scope="module")
def both(valkey_url: str) -> dict[str, tuple[dict[str, Any], str]]:
    return {where: results(valkey_url, where) for where in ("off", "on")}


@pytest.mark.parametrize("name", JOBS)
def test_results_are_equal(both: dict[str, tuple[dict[str, Any], str]], name: str) -> None:
    thread, process = both["off"][0][name], both["on"][0][name]
    assert process == thread
    assert thread["outputs"][0]["token_ids"]


def test_metrics_are_the_same_and_count_the_same(both: dict[str, tuple[dict[str, Any], str]]) -> None:
    def of(text: str, pattern: str) -> list[str]:
        text = re.sub(r'queue="[^"]*"|worker="[^"]*"', "", text)
        return sorted(set(re.findall(pattern, text, re.MULTILINE)))

    thread, process = both["off"][1], both["on"][1]
    assert of(process, r"^# TYPE .*") == of(thread, r"^# TYPE .*")
    assert of(process, COUNTED) == of(thread, COUNTED)
    assert any(line.startswith("pagemill_generated_tokens_total") for line in of(thread, COUNTED))


def test_vectors_are_equal(valkey_url: str, queue_name: str, embedder: Path) -> None:
    texts = ["one two", "three four five six"]
    config = worker_config(valkey_url, queue_name, model=str(embedder), num_threads=1, engine_process="on")
    with running_worker(config), Producer(valkey_url, queue=queue_name) as producer:
        result = producer.submit(model="embedder", task="embed", inputs=texts).result(timeout=120)
    assert result.embeddings == run(engine_of(embedder), "embed", texts).tolist()
