"""A dataset run next to interactive jobs, which finish while it continues."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from pagemill import Producer
from pagemill.producer.dataset.journal import Journal
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.recipe import Recipe
from pagemill.producer.dataset.run import DatasetRun
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.tables.rows import MemorySource
from pagemill.producer.dataset.work import Work, WorkLoop
from pagemill.producer.openai.lines import BatchRequests
from tests.producer.gateway.serving import gateway
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

ROWS = [{"text": f"row {i}"} for i in range(160)]
Run = Callable[..., Summary]


@pytest.fixture
def client(valkey_url: str, queue_name: str) -> Iterator[QueueClient]:
    """A queue with a worker that runs four jobs in parallel, slowly."""
    with (
        QueueClient(valkey_url, queue_name) as client,
        running_worker(worker_config(valkey_url, queue_name, model="echo:10", max_num_seqs=4)),
    ):
        yield client


@contextmanager
def long_run(client: QueueClient, tmp_path: Path, **options: Any) -> Iterator[None]:
    """A run of hundreds of rows, all of which wait in the queue when the block starts; it ends with the block."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with Producer(client.url, queue=client.queue) as producer:
                pipeline = Pipeline("{{ text }}", model="echo", chat=False, **options)
                summary = pipeline.run(ROWS, out=tmp_path / "out.jsonl", producer=producer)
            assert (summary.succeeded, summary.rows) == (len(ROWS), len(ROWS))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        eventually(lambda: waiting(client) > len(ROWS) // 2, "the run's jobs")
        yield
    finally:
        thread.join(PATIENCE_S)
    assert not failures, failures


def waiting(client: QueueClient) -> int:
    return sum(client.stats().waiting.values())


@pytest.mark.slow
def test_a_normal_job_overtakes_a_run(client: QueueClient, tmp_path: Path) -> None:
    with long_run(client, tmp_path), Producer(client.url, queue=client.queue) as producer:
        assert {lane[:2] for lane in client.stats().waiting} == {("low", "dataset-runs")}
        handle = producer.submit(prompt="somebody waits", model="echo", max_tokens=4)
        assert handle.result(timeout=PATIENCE_S).text
        assert waiting(client) > len(ROWS) // 4, "the run had ended before the job was answered"


@pytest.mark.slow
def test_a_chat_at_the_gateway_overtakes_a_run(client: QueueClient, tmp_path: Path) -> None:
    with (
        gateway(client.url, client.queue) as served,
        OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as openai,
    ):
        served.wait_for("echo")
        with long_run(client, tmp_path):
            chat = openai.chat.completions.create(
                model="echo", messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
            assert chat.choices[0].message.content
            assert waiting(client) > len(ROWS) // 4, "the run had ended before the chat was answered"


@pytest.mark.slow
def test_two_runs_of_different_tenants_take_turns(client: QueueClient, tmp_path: Path) -> None:
    with long_run(client, tmp_path), Producer(client.url, queue=client.queue, tenant="acme") as producer:
        Pipeline("{{ text }}", model="echo", chat=False).run(
            [{"text": "a"}, {"text": "b"}], out=tmp_path / "other.jsonl", producer=producer
        )
        assert waiting(client) > len(ROWS) // 4


def test_a_run_waits_where_it_is_told_to(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    """Without a worker: only the lanes are checked."""

    client = QueueClient(valkey_url, queue_name)

    def lanes(producers: str, **fields: Any) -> set[tuple[str, str, str]]:
        before = set(client.stats().waiting)
        with Producer(valkey_url, queue=queue_name, tenant=producers) as producer:
            recipe = Recipe("m", "{{ text }}", fields={"temperature": 0.0, **fields})
            out = tmp_path / f"{len(before)}.jsonl"
            DatasetRun(MemorySource(ROWS[:2]), out, recipe).detach(producer)
        return set(client.stats().waiting) - before

    assert lanes("default") == {("low", "dataset-runs", "m")}
    assert lanes("acme") == {("low", "acme", "m")}
    assert lanes("default", priority="normal", tenant="shop") == {("normal", "shop", "m")}
    client.redis.close()


def test_a_batch_file_waits_like_a_run(valkey_url: str, queue_name: str, tmp_path: Path) -> None:

    requests = tmp_path / "requests.jsonl"
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": "x"},
    }
    requests.write_text(json.dumps(line))
    client = QueueClient(valkey_url, queue_name)
    with Producer(valkey_url, queue=queue_name) as producer, Journal(tmp_path / "j") as journal:
        (request,) = BatchRequests(requests)
        WorkLoop(producer, journal).run(lambda: iter([Work(request.work_key(), request.job)]), collect=False)  # type: ignore[arg-type]
    assert set(client.stats().waiting) == {("low", "dataset-runs", "m")}
    client.redis.close()


@pytest.mark.slow
def test_a_chat_behind_five_thousand_low_rows_is_answered(client: QueueClient) -> None:
    for _ in range(5):
        client.submit(*({"prompt": "row", "priority": "low", "tenant": "dataset-runs"} for _ in range(1000)))
    with (
        gateway(client.url, client.queue) as served,
        OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as openai,
    ):
        served.wait_for("echo")
        before = waiting(client)
        chat = openai.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "hello"}], max_tokens=4
        )
        assert chat.choices[0].message.content
        assert before > 4500
        assert before - waiting(client) < 100, "hardly a row went before it"
