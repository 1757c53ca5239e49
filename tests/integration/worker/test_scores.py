"""Jobs of the task `score`: from a producer through a real server and worker, and across a worker's crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.dense import dense_smollm2
from pagemill import InvalidJob, Job, JobCancelled, JobFailed, Producer
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.tables.rows import open_source
from tests.chaos.fork_server import ForkServer
from tests.worker.harness import (
    PATIENCE_S,
    QueueClient,
    eventually,
    process_settings,
    running_worker,
    worker_config,
)

PROMPT = "The capital of France is"
CITIES = [" Paris", " London", " Rome, of all places", " the city of Paris"]


@pytest.fixture(scope="module")
def queue(valkey_url: str) -> Iterator[Producer]:
    config = worker_config(
        valkey_url, "scores", model="smollm2", kv_cache_memory_bytes=128 << 20, num_threads=1
    )
    with running_worker(config, load_patience_s=400), Producer(valkey_url, queue="scores") as producer:
        yield producer


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(dense_smollm2(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(dense_smollm2())


def expected(model: Any, prompt: list[int], continuation: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + continuation])).logits[0].log_softmax(-1)
    return [logits[len(prompt) + i - 1, token].item() for i, token in enumerate(continuation)]


@pytest.mark.slow
def test_continuations(queue: Producer, model: Any, tokenizer: Any) -> None:
    result = queue.submit(task="score", prompt=PROMPT, continuations=CITIES, model="smollm2").result(
        timeout=300
    )
    prompt = tokenizer.encode(PROMPT)
    for text, output in zip(CITIES, result.outputs, strict=True):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        wanted = expected(model, prompt, tokens)
        assert output.text == text
        assert list(output.token_ids) == tokens
        assert output.logprobs is not None
        assert [entry.chosen.logprob for entry in output.logprobs] == pytest.approx(wanted, abs=1e-4)
        assert output.logprob == pytest.approx(sum(wanted), abs=1e-3)
    assert max(result.outputs[:2], key=lambda output: output.logprob or 0.0).text == " Paris"
    lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in CITIES]
    assert result.usage.prompt_tokens == len(prompt) + sum(lengths)
    assert result.usage.completion_tokens == 0


@pytest.mark.slow
def test_the_prompt_itself(queue: Producer, model: Any, tokenizer: Any) -> None:
    handle = queue.submit(Job(task="score", prompt=PROMPT, model="smollm2", logprobs=2, tenant="default"))
    (output,) = handle.result(timeout=300).outputs
    tokens = tokenizer.encode(PROMPT)
    assert output.text == PROMPT
    assert list(output.token_ids) == tokens
    first, *others = output.logprobs or ()
    assert (first.chosen.logprob, first.top) == (None, ())
    assert [len(entry.top) for entry in others] == [2] * (len(tokens) - 1)
    wanted = expected(model, tokens[:1], tokens[1:])
    assert [entry.chosen.logprob for entry in others] == pytest.approx(wanted, abs=1e-4)
    assert output.logprob == pytest.approx(sum(wanted), abs=1e-3)
    assert "".join(entry.chosen.text for entry in (first, *others)) == PROMPT
    assert handle.status().progress.generated_tokens == 0


@pytest.mark.slow
def test_a_batch_beside_generation(queue: Producer) -> None:
    jobs: list[dict[str, Any]] = [
        {"task": "score", "prompt": f"{number}: {PROMPT}", "continuations": CITIES[:2], "model": "smollm2"}
        for number in range(20)
    ]
    jobs += [{"prompt": PROMPT, "max_tokens": 4, "temperature": 0.0, "model": "smollm2"}] * 5
    items = list(queue.submit_many(jobs).results())
    assert len(items) == 25
    results = [item.result for item in items]
    assert all(result is not None for result in results)
    assert sum(result is not None and len(result.outputs) == 2 for result in results) == 20


@pytest.mark.slow
def test_equal_ones_run_once(queue: Producer) -> None:
    job = {"task": "score", "prompt": PROMPT, "continuations": CITIES, "model": "smollm2", "dedupe": True}
    queue.submit_many([job] * 8, batch_id="equal").wait(timeout=300)
    results = [item.result for item in queue.batch("equal").results()]
    assert len({result.outputs for result in results if result is not None}) == 1
    assert sum(result is not None and result.copied_from is not None for result in results) >= 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 0.5}, "a score job cannot have temperature"),
        ({"max_tokens": 5}, "a score job cannot have max_tokens"),
        ({"stream": True}, "a score job can't stream"),
        ({"continuations": []}, "continuations: List should have at least 1 item"),
        ({"continuations": ["a"] * 129}, "continuations: List should have at most 128 items"),
        ({"task": "generate", "continuations": ["a"]}, "a generate job cannot have continuations"),
        ({"task": "guess"}, "task: Input should be 'generate', 'score', 'embed'"),
    ],
)
def test_what_makes_no_sense_is_refused_at_submit(
    queue: Producer, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJob, match=message):
        queue.submit({"task": "score", "prompt": PROMPT, "model": "smollm2"} | fields)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": "a"}, "invalid_job"),
        ({"prompt": "word " * 9000}, "prompt_too_long"),
        ({"prompt": "word " * 7000, "logprobs": 20}, "result_too_large"),
        ({"continuations": [[99999999]]}, "invalid_job"),
    ],
)
def test_what_only_the_worker_can_tell_fails_alone(
    queue: Producer, fields: dict[str, Any], code: str
) -> None:
    bad = queue.submit({"task": "score", "prompt": PROMPT, "model": "smollm2"} | fields)
    good = queue.submit(task="score", prompt=PROMPT, model="smollm2")
    with pytest.raises(JobFailed) as failed:
        bad.result(timeout=300)
    assert failed.value.code == code
    assert good.result(timeout=300).outputs


@pytest.mark.slow
def test_a_killed_worker_s_jobs_are_taken_over(tmp_path: Path, client: QueueClient) -> None:
    job = {
        "task": "score",
        "prompt": "a long context " * 40,
        "continuations": ["0123456789"[:n] for n in range(1, 11)],
    }
    with ForkServer(
        tmp_path, process_settings(client.url, client.queue, model="echo:20", max_num_seqs=2)
    ) as fork_server:
        ids = client.submit(*[job | {"metadata": {"row": row}} for row in range(4)])
        results = fork_server.taken_over(client, ids)
    for result in results:
        assert [output.text for output in result.outputs] == job["continuations"]
        assert all(output.finish_reason == "stop" for output in result.outputs)


@pytest.mark.slow
def test_a_partly_scored_job_is_cancelled_and_another_is_requeued(valkey_url: str, queue_name: str) -> None:
    """The ends of both write a checkpoint with the finished continuations first."""
    config = worker_config(
        valkey_url, queue_name, model="echo:200", max_num_seqs=2, drain_grace_s=0.1, checkpoint_s=0.1
    )
    texts = [str(number) * 9 for number in range(10, 50)]
    with Producer(valkey_url, queue=queue_name) as producer:
        with running_worker(config) as worker:

            def has_begun(job_id: str) -> bool:
                running = [job for job in worker.table.running() if job.job_id == job_id]
                return any(sample.finish_reason is not None for job in running for sample in job.samples[1:])

            jobs = [
                producer.submit(
                    task="score", prompt="p", continuations=texts, model="echo", priority=priority
                )
                for priority in ("high", "low")
            ]
            eventually(lambda: has_begun(jobs[0].id), "scored continuations")
            jobs[0].cancel()
            with pytest.raises(JobCancelled):
                jobs[0].result(PATIENCE_S)
            eventually(lambda: has_begun(jobs[1].id), "scored continuations")
        assert jobs[1].status().state == "queued"
        with running_worker(config):
            result = jobs[1].result(4 * PATIENCE_S)
    assert [output.text for output in result.outputs] == texts
    assert jobs[1].status().attempt == 1


@pytest.fixture
def echo(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with (
        running_worker(worker_config(valkey_url, queue_name)),
        Producer(valkey_url, queue=queue_name) as producer,
    ):
        yield producer


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_dataset_is_scored_and_resumed(echo: Producer, tmp_path: Path, suffix: str) -> None:
    rows = [{"text": f"row {number}"} for number in range(30)]
    pipeline = Pipeline("Is it good? {{ text }}", model="echo", task="score", continuations=["yes", "no"])
    out = tmp_path / f"out{suffix}"
    summary = pipeline.run(rows, out=out, producer=echo, limit=10)
    assert (summary.succeeded, summary.completion_tokens) == (10, 0)
    summary = pipeline.run(rows, out=out, producer=echo)
    assert (summary.succeeded, summary.adopted) == (30, 10)
    lines = [row.fields for row in open_source(out).rows()]
    outputs = [(line or {})["output"] for line in lines]
    scores = [json.loads(output) if isinstance(output, str) else output for output in outputs]
    assert scores == [{"yes": pytest.approx(-0.03), "no": pytest.approx(-0.02)}] * 30


@pytest.mark.slow
def test_the_command_line_scores(echo: Producer, tmp_path: Path) -> None:
    address = ["--redis-url", str(echo._url), "--queue", echo.queue, "--model", "echo"]

    def pagemill(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "pagemill", *arguments, *address],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        ).stdout

    printed = pagemill("submit", "a question:", "--continuation", "yes", "--continuation", "no", "--wait")
    assert printed == "-0.0300\tyes\n-0.0200\tno\n"
    assert pagemill("submit", "abc", "--field", "task=score", "--wait") == "-0.0200\tabc\n"
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "abcd"}\n{"prompt": "abc"}\n')
    pagemill("run", str(source), "--out", str(out), "--no-chat", "--field", "task=score", "--quiet")
    outputs = [json.loads(line)["output"] for line in out.read_text().splitlines()]
    assert outputs == [pytest.approx(-0.03), pytest.approx(-0.02)]
