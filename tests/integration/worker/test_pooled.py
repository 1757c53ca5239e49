"""Jobs for vectors, labels and scores: from a producer through a real server and worker, and back as numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModel

from pagemill import InvalidJob, Job, JobFailed, Producer
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.tables.rows import open_source
from tests.chaos.fork_server import ForkServer
from tests.engine.pooling.test_labels import saved as save_classifier
from tests.engine.pooling.tiny_pooling import ENCODERS, engine_of, run, save_base, texts_of_all_lengths
from tests.worker.harness import QueueClient, eventually, process_settings, running_worker, worker_config

TEXTS = texts_of_all_lengths()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_base(directory / "embedder", ENCODERS["bert"], AutoModel)
    save_classifier(directory / "judge", "bert", 1)
    save_classifier(directory / "sorter", "roberta", 3, id2label={0: "bad", 1: "fair", 2: "good"})
    return directory


@pytest.fixture(scope="module")
def queue(valkey_url: str, models: Path) -> Iterator[Producer]:
    """One queue with a worker for each model."""
    names = ("embedder", "judge", "sorter")
    configs = [
        worker_config(
            valkey_url, "pooled", model=str(models / name), num_threads=1, max_num_batched_tokens=64
        )
        for name in names
    ]
    with (
        running_worker(configs[0]),
        running_worker(configs[1]),
        running_worker(configs[2]),
        running_worker(worker_config(valkey_url, "pooled", model="echo")),
        Producer(valkey_url, queue="pooled") as producer,
    ):
        yield producer


def expected(models: Path, name: str, kind: str, texts: list[Any], **fields: Any) -> np.ndarray[Any, Any]:
    return run(engine_of(models / name), kind, texts, **fields)


@pytest.mark.slow
def test_vectors(queue: Producer, models: Path) -> None:
    wanted = expected(models, "embedder", "embed", TEXTS)
    one = queue.submit(task="embed", prompt=TEXTS[1], model="embedder").result(timeout=60)
    assert np.abs(np.asarray(one.embedding) - wanted[1]).max() < 1e-5
    handle = queue.submit(Job(task="embed", inputs=TEXTS, model="embedder", tenant="default"))
    result = handle.result(timeout=60)
    assert result.rows is not None
    array = np.asarray(result.rows)
    assert (array.shape, array.dtype) == ((len(TEXTS), 32), np.float32)
    assert np.abs(array - wanted).max() < 1e-5
    assert array.tolist() == result.embeddings
    assert result.usage.prompt_tokens == sum(len(text.split()) + 2 for text in TEXTS)
    assert (result.usage.completion_tokens, result.labels, result.text) == (0, None, "")
    assert handle.status().progress.generated_tokens == 0


@pytest.mark.slow
def test_fewer_bits_and_fewer_dimensions(queue: Producer, models: Path) -> None:
    wanted = expected(models, "embedder", "embed", TEXTS, dimensions=8)
    job = {"task": "embed", "inputs": TEXTS, "model": "embedder", "dimensions": 8, "rows_dtype": "float16"}
    result = queue.submit(job).result(timeout=60)
    assert result.rows is not None
    assert (result.rows.dtype, result.rows.shape) == ("float16", (len(TEXTS), 8))
    assert np.abs(np.asarray(result.rows).astype(np.float32) - wanted).max() < 2e-3
    assert np.asarray(result.rows).tolist() == result.embeddings


def test_scores_of_documents(queue: Producer, models: Path) -> None:
    wanted = expected(models, "judge", "rerank", TEXTS[:7], query="w1 w2")
    result = queue.submit(task="rerank", prompt="w1 w2", documents=TEXTS[:7], model="judge").result(
        timeout=60
    )
    assert result.scores == pytest.approx(wanted[:, 0].tolist(), abs=1e-5)


def test_labels(queue: Producer, models: Path) -> None:
    wanted = expected(models, "sorter", "classify", TEXTS[:3])
    result = queue.submit(task="classify", inputs=TEXTS[:3], model="sorter").result(timeout=60)
    assert result.labels == ("bad", "fair", "good")
    found = [[labels[name] for name in ("bad", "fair", "good")] for labels in result.classes]
    assert np.abs(np.asarray(found) - wanted).max() < 1e-5
    reward = queue.submit(task="classify", prompt="w1 w2", model="judge").result(timeout=60)
    assert list(reward.classes[0]) == ["LABEL_0"]


def test_a_batch_of_many(queue: Producer, models: Path) -> None:
    wanted = expected(models, "embedder", "embed", TEXTS)
    jobs = [{"task": "embed", "prompt": text, "model": "embedder"} for text in TEXTS * 3]
    items = sorted(queue.submit_many(jobs).results(), key=lambda item: int(item.key))
    found = np.array([item.result.embedding for item in items if item.result is not None])
    assert np.abs(found - np.concatenate([wanted] * 3)).max() < 1e-5


def test_equal_ones_run_once(queue: Producer) -> None:
    job = {"task": "embed", "prompt": "w9 w9", "model": "embedder", "dedupe": True}
    queue.submit_many([job] * 8, batch_id="equal-vectors").wait(timeout=60)
    results = [item.result for item in queue.batch("equal-vectors").results()]
    assert (
        len({result.rows.data for result in results if result is not None and result.rows is not None}) == 1
    )
    assert sum(result is not None and result.copied_from is not None for result in results) >= 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "temperature": 0.5}, "an? embed job cannot have temperature"),
        ({"prompt": "a", "stream": True}, "an? embed job can't stream"),
        ({"messages": [{"role": "user", "content": "a"}]}, "cannot have messages"),
        ({"prompt": "a", "inputs": ["b"]}, "exactly one of prompt, messages, prompt_token_ids, inputs"),
        ({"inputs": []}, "at least 1"),
        ({"inputs": ["a"] * 2049}, "at most 2048"),
        ({"inputs": [""]}, "at least 1 character"),
        ({"inputs": [[]]}, "at least 1 item"),
        ({"prompt": "a", "dimensions": 0}, "dimensions"),
        ({"prompt": "a", "rows_dtype": "float64"}, "rows_dtype: Input should be 'float32' or 'float16'"),
        ({"prompt": "a", "documents": ["b"]}, "cannot have documents"),
        ({"task": "rerank", "prompt": "a"}, "takes a prompt, the query, and documents"),
        ({"task": "rerank", "prompt": "a", "inputs": ["b"]}, "cannot have inputs"),
        ({"task": "classify", "documents": ["b"]}, "exactly one of|documents go with a prompt"),
        ({"task": "generate", "inputs": ["b"]}, "cannot have inputs"),
        ({"task": "generate", "prompt": "a", "truncate": True}, "cannot have truncate"),
    ],
)
def test_what_makes_no_sense_is_refused_at_submit(
    queue: Producer, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJob, match=message):
        queue.submit({"task": "embed", "model": "embedder"} | fields)


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        (
            {"prompt": "a"},
            "unsupported_feature",
            "gives vectors and does not accept generate jobs: submit with task embed",
        ),
        ({"task": "score", "prompt": "a b"}, "unsupported_feature", "does not accept score jobs"),
        (
            {"task": "rerank", "prompt": "a", "documents": ["b"]},
            "unsupported_feature",
            "submit with task embed",
        ),
        ({"task": "embed", "prompt": "a", "model": "echo"}, "unsupported_feature", "task generate or score"),
        ({"task": "embed", "prompt": "a", "model": "sorter"}, "unsupported_feature", "task classify"),
        ({"task": "embed", "prompt": "w1 " * 60}, "prompt_too_long", "the model takes 60"),
        ({"task": "embed", "prompt": "a", "dimensions": 33}, "invalid_job", "vectors have 32"),
        ({"task": "embed", "prompt": "a", "prompt_name": "q"}, "invalid_job", "it has none"),
        ({"task": "embed", "prompt_token_ids": [99999]}, "invalid_job", "token ids must be in"),
    ],
)
def test_what_only_the_worker_can_tell_fails_alone(
    queue: Producer, fields: dict[str, Any], code: str, message: str
) -> None:
    bad = queue.submit({"model": "embedder"} | fields)
    good = queue.submit(task="embed", prompt="w1", model="embedder")
    with pytest.raises(JobFailed, match=message) as failed:
        bad.result(timeout=60)
    assert failed.value.code == code
    assert len(good.result(timeout=60).embedding) == 32


def test_a_result_that_no_record_can_hold_is_refused_before_it_runs(
    queue: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.worker.jobs.intake.MAX_RESULT_BYTES", 5000)
    job = {"task": "embed", "inputs": TEXTS, "model": "embedder"}
    with pytest.raises(
        JobFailed, match=r"the result would have 6,828 bytes, .* rows_dtype float16"
    ) as failed:
        queue.submit(job).result(timeout=60)
    assert failed.value.code == "result_too_large"
    assert queue.submit(job | {"rows_dtype": "float16"}).result(timeout=60).rows is not None


@pytest.mark.slow
def test_a_job_can_be_cancelled_and_a_deadline_ends_it(queue: Producer) -> None:
    long = {"task": "embed", "inputs": TEXTS * 50, "model": "embedder"}
    handles = [queue.submit(long | {"dimensions": number}) for number in range(1, 6)]
    assert handles[-1].cancel()
    eventually(lambda: handles[-1].status().done, "the end of the cancelled job", 60)
    assert handles[-1].status().state == "cancelled"
    late = queue.submit(long | {"timeout": 0.001})
    eventually(lambda: late.status().done, "the end of the late job", 60)
    assert late.status().state == "expired"
    assert all(handle.result(timeout=120).rows is not None for handle in handles[:-1])


@pytest.mark.slow
def test_a_killed_worker_s_jobs_are_taken_over(tmp_path: Path, models: Path, client: QueueClient) -> None:
    model = str(models / "embedder")
    job = {"task": "embed", "inputs": TEXTS * 50, "model": "embedder"}
    with ForkServer(
        tmp_path,
        process_settings(client.url, client.queue, model=model, max_num_batched_tokens=64, num_threads=1),
    ) as fork_server:
        ids = client.submit(*[job | {"metadata": {"row": row}} for row in range(4)])
        results = fork_server.taken_over(client, ids)
    wanted = expected(models, "embedder", "embed", TEXTS)
    for result in results:
        assert result.rows is not None
        assert np.abs(np.asarray(result.rows)[: len(TEXTS)] - wanted).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_dataset_is_embedded_and_resumed(
    queue: Producer, models: Path, tmp_path: Path, suffix: str
) -> None:
    wanted = expected(models, "embedder", "embed", TEXTS)
    rows = [{"prompt": text} for text in TEXTS]
    pipeline = Pipeline(model="embedder", task="embed")
    out = tmp_path / f"out{suffix}"
    summary = pipeline.run(rows, out=out, producer=queue, limit=10)
    assert (summary.succeeded, summary.completion_tokens) == (10, 0)
    summary = pipeline.run(rows, out=out, producer=queue)
    assert (summary.succeeded, summary.adopted) == (len(TEXTS), 10)
    outputs = [(row.fields or {})["output"] for row in open_source(out).rows()]
    found = [json.loads(output) if isinstance(output, str) else output for output in outputs]
    assert np.abs(np.array(found) - wanted).max() < 1e-5
    if suffix == ".parquet":
        from pyarrow import parquet

        assert str(parquet.read_schema(out).field("output").type) == "list<element: float>"


@pytest.mark.slow
def test_datasets_of_labels_and_scores(queue: Producer, models: Path, tmp_path: Path) -> None:
    labels = expected(models, "sorter", "classify", TEXTS[:5])
    out = tmp_path / "labels.parquet"
    for _ in range(2):  # the second takes all of the first's work
        Pipeline("{{ t }}", model="sorter", task="classify").run(
            [{"t": text} for text in TEXTS[:5]], out=out, producer=queue
        )
    found = [json.loads((row.fields or {})["output"]) for row in open_source(out).rows()]
    assert np.abs(np.array([list(row.values()) for row in found]) - labels).max() < 1e-5
    scores = expected(models, "judge", "rerank", TEXTS[:3], query="w1")
    ranked = tmp_path / "scores.jsonl"
    for _ in range(2):
        Pipeline(model="judge", task="rerank").run(
            [{"prompt": "w1", "documents": TEXTS[:3]}], out=ranked, producer=queue
        )
    (line,) = [json.loads(line) for line in ranked.read_text().splitlines()]
    assert line["output"] == pytest.approx(scores[:, 0].tolist(), abs=1e-5)


@pytest.mark.slow
def test_the_command_line(queue: Producer, models: Path) -> None:
    def submitted(text: str, model: str, *fields: str) -> list[str]:
        address = ["--redis-url", str(queue._url), "--queue", queue.queue, "--model", model]
        chosen = [part for field in fields for part in ("--field", field)]
        printed = subprocess.run(
            [sys.executable, "-m", "pagemill", "submit", text, *address, *chosen, "--wait"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        )
        return printed.stdout.splitlines()

    (vector,) = submitted("w1 w2", "embedder", "task=embed", "dimensions=4")
    assert json.loads(vector) == pytest.approx(
        expected(models, "embedder", "embed", ["w1 w2"])[0, :4], abs=1e-5
    )
    lines = submitted("w1 w2", "sorter", "task=classify")
    assert sorted(line.split("\t")[1] for line in lines) == ["bad", "fair", "good"]
    assert len(submitted("w1", "judge", "task=rerank", 'documents=["w2","w3"]')) == 2
