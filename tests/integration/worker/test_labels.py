"""Jobs with `label_probs`: from a producer through a real server and worker, and across a worker's crash."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.dense import dense_smollm2
from pagemill import InvalidJob, Job, JobFailed, Producer
from pagemill.producer.celery.task import plain_result
from pagemill.producer.dataset.tables.rows import open_source
from tests.chaos.fork_server import ForkServer
from tests.worker.harness import QueueClient, process_settings, running_worker, worker_config

PROMPT = "Review: I loved every minute of it.\nThe label is:"
LABELS = [" positive", " negative", " very positive", " very negative", " neutral", " neutral or so"]
SHAPE = {"choice": LABELS}


@pytest.fixture(scope="module")
def queue(valkey_url: str) -> Iterator[Producer]:
    config = worker_config(
        valkey_url, "labels", model="smollm2", kv_cache_memory_bytes=128 << 20, num_threads=1
    )
    with running_worker(config, load_patience_s=400), Producer(valkey_url, queue="labels") as producer:
        yield producer


def asked(**fields: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT, "model": "smollm2", "structured_outputs": SHAPE, "label_probs": "product", **fields,
    }  # fmt: skip


def expected(prompt: str, labels: list[str]) -> dict[str, float]:
    """Score each label by transformers; " neutral" includes the end token, since another label extends it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = dense_smollm2()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    start, scores = tokenizer.encode(prompt), []
    for label in labels:
        tokens = tokenizer.encode(label, add_special_tokens=False)
        if any(other != label and other.startswith(label) for other in labels):
            tokens.append(tokenizer.eos_token_id)
        with torch.no_grad():
            logits = model(torch.tensor([start + tokens])).logits[0].double().log_softmax(-1)
        scores.append(sum(logits[len(start) + i - 1, token].item() for i, token in enumerate(tokens)))
    return dict(zip(labels, torch.tensor(scores).double().softmax(-1).tolist(), strict=True))


@pytest.mark.slow
def test_every_label_has_its_probability(queue: Producer) -> None:
    result = queue.submit(**asked()).result(timeout=300)
    wanted = expected(PROMPT, LABELS)
    assert result.label_probs == pytest.approx(wanted, abs=1e-5)
    assert list(result.label_probs or ()) == LABELS
    assert result.label == max(wanted, key=wanted.__getitem__) == result.text
    assert result.finish_reason == "stop"
    assert result.outputs[0].logprob is not None
    assert result.outputs[0].logprob < math.log(result.label_probs[result.label])  # type: ignore[index]
    assert result.usage.completion_tokens == len(result.token_ids)
    plain = plain_result(result)
    assert (plain["label"], plain["label_probs"]) == (result.label, result.label_probs)


@pytest.mark.slow
def test_equal_ones_run_once_without_a_seed(queue: Producer) -> None:
    queue.submit_many([asked(dedupe=True)] * 6, batch_id="equal").wait(timeout=300)
    results = [item.result for item in queue.batch("equal").results()]
    assert len({str(result.label_probs) for result in results if result is not None}) == 1
    assert sum(result is not None and result.copied_from is not None for result in results) >= 1


def test_the_digest_tells_kinds_apart() -> None:
    kinds: list[dict[str, Any]] = [{}, {"label_probs": "mean"}, {"label_probs": "constrained"}]
    jobs = [Job.parse(asked(**fields)) for fields in kinds]
    plain = Job.parse({name: value for name, value in asked().items() if name != "label_probs"})
    assert len({job.digest() for job in (*jobs, plain)}) == 4
    assert Job.from_payload(jobs[0].to_payload()) == jobs[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": None}, "label_probs needs structured_outputs with a choice"),
        ({"structured_outputs": {"regex": "a"}}, "label_probs needs structured_outputs with a choice"),
        ({"structured_outputs": {"choice": ["a", "a"]}}, "two labels of the choice are equal"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "at most 1024 items"),
        ({"label_probs": "sum"}, "Input should be 'product', 'mean' or 'constrained'"),
        ({"label_probs": True}, "Input should be 'product', 'mean' or 'constrained'"),
        ({"n": 2, "logprobs": 1}, "label_probs cannot be combined with n, logprobs"),
        ({"stream": True}, "label_probs can't stream"),
        ({"task": "score", "structured_outputs": None}, "label_probs"),
    ],
)
def test_what_makes_no_sense_is_refused_at_submit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJob, match=message):
        Job.parse(asked(**fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"structured_outputs": {"choice": ["w" * 800, "b"]}}, "prompt_too_long"),
        ({"structured_outputs": {"choice": ["é" * 2000, "b"]}}, "schema_too_complex"),
    ],
)
def test_what_only_the_worker_can_tell_fails_alone(
    valkey_url: str, queue_name: str, fields: dict[str, Any], code: str
) -> None:
    config = worker_config(valkey_url, queue_name, max_model_len=700)
    with running_worker(config), Producer(valkey_url, queue=queue_name) as producer:
        bad = producer.submit(**asked(model="echo", **fields))
        good = producer.submit(**asked(model="echo"))
        with pytest.raises(JobFailed) as failed:
            bad.result(timeout=60)
        assert failed.value.code == code
        assert good.result(timeout=60).label in LABELS


@pytest.mark.slow
def test_a_killed_worker_s_jobs_are_taken_over(tmp_path: Path, client: QueueClient) -> None:
    labels = ["0123456789"[:n] for n in range(1, 11)]
    job = {
        "prompt": "a long context " * 40,
        "structured_outputs": {"choice": labels},
        "label_probs": "mean",
    }
    with ForkServer(
        tmp_path, process_settings(client.url, client.queue, model="echo:100", max_num_seqs=2)
    ) as fork_server:
        ids = client.submit(*[job | {"metadata": {"row": row}} for row in range(4)])
        results = fork_server.taken_over(client, ids)
    assert len({str(result.outputs) for result in results}) == 1
    probs = results[0].label_probs or {}
    assert list(probs) == labels
    assert sum(probs.values()) == pytest.approx(1.0)


@pytest.mark.slow
def test_a_chat_with_its_thinking_switched_off(valkey_url: str, queue_name: str) -> None:
    job = asked(model="echo", chat_template_kwargs={"enable_thinking": False})
    del job["prompt"]
    with running_worker(worker_config(valkey_url, queue_name)), Producer(valkey_url, queue=queue_name) as one:
        result = one.submit(job | {"messages": [{"role": "user", "content": "x"}]}).result(timeout=60)
    assert result.label in LABELS
    assert list(result.label_probs or ()) == LABELS


@pytest.mark.slow
def test_the_command_line_prints_them(valkey_url: str, queue_name: str) -> None:
    with running_worker(worker_config(valkey_url, queue_name)):
        printed = subprocess.run(
            [sys.executable, "-m", "pagemill", "submit", "bad or good?", "--choice", "good", "--choice", "bad",
             "--field", "label_probs=product", "--wait", "--redis-url", valkey_url, "--queue", queue_name,
             "--model", "echo"],
            stdout=subprocess.PIPE, text=True, check=True, timeout=120,
        ).stdout  # fmt: skip
    lines = [line.split("\t") for line in printed.splitlines()]
    assert [label for _, label in lines] == ["bad", "good"]
    assert sum(float(number) for number, _ in lines) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_the_command_line_labels_a_dataset(
    valkey_url: str, queue_name: str, tmp_path: Path, suffix: str
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / f"out{suffix}"
    rows = [{"text": word, "side": side} for word, side in (("good", "good"), ("bad", "bad"), ("go", "bad"))]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "pagemill", "run", str(source), "--out", str(out), "--no-chat",
               "--template", "{{ text }}", "--choices", "good,bad", "--label-probs", "mean", "--gold", "side",
               "--redis-url", valkey_url, "--queue", queue_name, "--model", "echo", "--json", "--quiet"]  # fmt: skip
    with running_worker(worker_config(valkey_url, queue_name)):
        for more in ([], ["--label-temperature", "fit"]):
            done = subprocess.run(
                [*command, *more], stdout=subprocess.PIPE, text=True, timeout=120, check=False
            )
            facts = json.loads(done.stdout)
            assert (done.returncode, facts["succeeded"]) == (0, 3)
    assert facts["accuracy"] == pytest.approx(2 / 3)
    assert facts["macro_f1"] == pytest.approx(2 / 3)
    assert facts["calibration"]["temperature"] == facts["calibration"]["fitted_temperature"] > 1.0
    lines = [row.fields or {} for row in open_source(out).rows()]
    assert [line["label"] for line in lines] == ["good", "bad", "good"]
    assert all(0.5 < float(line["label_prob"]) < 1.0 for line in lines)
