"""Models without a live worker: requests that get 503 or 404, and the lines of batches."""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types import Batch

from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.gateway import api_batches
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.producer.driving import Queue, open_queue
from tests.producer.gateway.serving import Served, gateway, gateway_process
from tests.producer.gateway.test_batches import batching, connect, end_of, lines, rows_of, start, upload
from tests.producer.scripted_worker import scripted_worker
from tests.worker.harness import PATIENCE_S, WorkerProcess, eventually, process_settings

HOUR_S = 3600.0


@pytest.fixture
def queue(valkey_url: str, queue_name: str) -> Iterator[Queue]:
    with open_queue(valkey_url, queue_name) as found:
        yield found


def register(queue: Queue, *models: str, ttl_ms: int = 300_000, adapters: tuple[str, ...] = ()) -> None:
    """Register a worker, as its heartbeat does."""
    info = WorkerInfo(id=f"w-{models[0]}", models=models, adapters=adapters)
    queue.run(registry.heartbeat(queue.name, info, ttl_ms=ttl_ms))


def register_absent(queue: Queue, *models: str, adapters: tuple[str, ...] = ()) -> None:
    """Register a worker whose registration has expired."""
    register(queue, *models, adapters=adapters, ttl_ms=1)
    eventually(
        lambda: (
            not {*models} & {name for info in queue.run(registry.workers(queue.name)) for name in info.models}
        ),
        "the end of the registration",
    )


def ask(served: Served, model: str, url: str = "completions") -> httpx.Response:
    field = "input" if url == "embeddings" else "prompt"
    body = {"model": model, field: "hello"} | ({} if url == "embeddings" else {"max_tokens": 2})
    return httpx.post(f"{served.base_url}/{url}", json=body, timeout=PATIENCE_S)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def lines_of(*models: str) -> list[dict[str, Any]]:
    rows = lines(len(models))
    for row, model in zip(rows, models, strict=True):
        row["body"]["model"] = model
    return rows


def waiting_models(client: OpenAI, batch_id: str) -> dict[str, tuple[str | None, int | None]]:
    """Return the models that the batch object reports as not ready, with their first lines."""
    found = client.batches.retrieve(batch_id)
    if found.errors is None or found.status != "in_progress":
        return {}
    assert found.errors.object == "list"
    return {(row.message or "").split("'")[1]: (row.code, row.line) for row in found.errors.data or []}


def codes_of(client: OpenAI, batch: Batch) -> dict[str, tuple[int, str]]:
    """Return the status and code of each line of the error file."""
    return {
        row["custom_id"]: (row["response"]["status_code"], row["response"]["body"]["error"]["code"])
        for row in rows_of(client, batch.error_file_id)
    }


def outputs_of(client: OpenAI, batch: Batch) -> list[str]:
    return [row["custom_id"] for row in rows_of(client, batch.output_file_id)]


@pytest.mark.slow
def test_a_frozen_worker_is_a_503_also_at_a_new_gateway(
    valkey_url: str, queue: Queue, tmp_path: Path
) -> None:
    with WorkerProcess(process_settings(valkey_url, queue.name), tmp_path / "worker.log") as worker:
        eventually(lambda: queue.run(registry.workers(queue.name)), "the worker's registration")
        worker.signal(signal.SIGSTOP)
        register(queue, "other")
        queue.submit("a", "b", model="echo")
        with gateway(valkey_url, queue.name) as served:
            eventually(
                lambda: len(queue.run(registry.workers(queue.name))) == 1, "the end of its registration"
            )
            # Gateways remember a worker for a while, so only a new gateway is certain to have forgotten it.
            with gateway(valkey_url, queue.name) as fresh:
                absent = ask(fresh, "echo")
                assert code_of(absent) == (503, "no_worker")
                assert int(absent.headers["retry-after"]) > 0
                assert code_of(ask(fresh, "ecko")) == (404, "model_not_found")
                worker.signal(signal.SIGCONT)
                eventually(lambda: ask(fresh, "echo").status_code == 200, "an answer of the worker")
            assert ask(served, "echo").status_code == 200


@pytest.mark.slow
def test_a_model_with_waiting_jobs_is_known(valkey_url: str, queue: Queue) -> None:
    register(queue, "other")
    queue.submit("a", model="never-served")
    with gateway(valkey_url, queue.name) as served:
        assert code_of(ask(served, "never-served")) == (503, "no_worker")
        queue.cancel("a")
        eventually(
            lambda: code_of(ask(served, "never-served")) == (404, "model_not_found"),
            "the end of what the gateway remembers",
        )


def test_a_model_that_was_served_lately_is_known(valkey_url: str, queue: Queue) -> None:
    register_absent(queue, "away", adapters=("red",))
    register(queue, "other")
    with gateway(valkey_url, queue.name) as served:
        assert code_of(ask(served, "away")) == (503, "no_worker")
        assert code_of(ask(served, "red")) == (503, "no_worker")
        assert code_of(ask(served, "red", "embeddings")) == (404, "model_not_found"), "it is an adapter"
        assert code_of(ask(served, "away", "embeddings")) == (503, "no_worker")


def test_the_queue_remembers_a_bounded_number_of_models_for_a_day(queue: Queue) -> None:
    key = f"{queue.prefix}served"
    queue.client.zadd(key, {f"old-{number}": 1 for number in range(10)})
    many = tuple(f"m{number}" for number in range(600))
    register(queue, *many)
    assert set(queue.run(registry.served(queue.name))) == set(many)
    register(queue, *(f"n{number}" for number in range(600)))
    assert queue.client.zcard(key) == 1000
    assert 0 < queue.client.pttl(key) <= 86_400_000


def test_lines_for_an_unknown_model_fail_after_the_grace_period(valkey_url: str, queue: Queue) -> None:
    register(queue, "m")
    with batching(valkey_url, queue.name, unknown_model_s=0.0) as (served, client):
        batch = end_of(client, start(client, lines_of("m", "nope", "m", "nope")).id)
        assert batch.status == "completed"
        assert outputs_of(client, batch) == ["r0", "r2"]
        assert codes_of(client, batch) == dict.fromkeys(("r1", "r3"), (404, "model_not_found"))
        assert batch.errors is None
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
        wrong = end_of(client, start(client, lines_of("nope", "nape", "nope")).id)
        assert wrong.status == "completed"
        assert wrong.output_file_id is None
        assert codes_of(client, wrong) == dict.fromkeys(("r0", "r1", "r2"), (404, "model_not_found"))
        assert code_of(ask(served, "nope")) == (404, "model_not_found"), "a batch makes no model known"


@pytest.mark.slow
def test_no_line_fails_while_no_worker_is_ready(valkey_url: str, queue: Queue) -> None:
    with gateway(valkey_url, queue.name, unknown_model_s=0.0) as served, connect(served) as client:
        batch_id = start(client, lines_of("m", "n", "m")).id
        wanted = {"m": ("model_not_ready", 1), "n": ("model_not_ready", 2)}
        eventually(lambda: waiting_models(client, batch_id) == wanted, "the models that it waits for")
        # Further checks: the first one decided nothing.
        seen = record_of(queue, batch_id)
        assert seen["is_final"] == "0"
        with scripted_worker(valkey_url, queue.name, models=("m", "n")):
            register(queue, "m", "n")
            batch = end_of(client, batch_id)
        assert batch.status == "completed"
        assert outputs_of(client, batch) == ["r0", "r1", "r2"]
        assert batch.error_file_id is None
        assert batch.errors is None


def record_of(queue: Queue, batch_id: str) -> dict[str, str]:
    """Return the batch's record."""
    flat = queue.client.hgetall(f"{queue.prefix}abatch:{batch_id}")
    return {name.decode(): value.decode() for name, value in flat.items()}


@pytest.mark.parametrize("known_by", ["operator", "lately", "jobs"])
def test_lines_for_a_known_model_wait_for_its_worker(valkey_url: str, queue: Queue, known_by: str) -> None:
    models = ("away",) if known_by == "operator" else ()
    if known_by == "lately":
        register_absent(queue, "away")
    elif known_by == "jobs":
        queue.submit("a", model="away")
    register(queue, "m")
    with batching(valkey_url, queue.name, unknown_model_s=0.0, models=models) as (_, client):
        batch_id = start(client, lines_of("m", "away", "nope")).id
        eventually(lambda: record_of(queue, batch_id).get("is_final") == "1", "the end of the grace period")
        eventually(
            lambda: waiting_models(client, batch_id) == {"away": ("model_not_ready", 2)},
            "the model that it waits for",
        )
        with scripted_worker(valkey_url, queue.name, models=("away",)):
            batch = end_of(client, batch_id)
        assert outputs_of(client, batch) == ["r0", "r1"]
        assert codes_of(client, batch) == {"r2": (404, "model_not_found")}


@pytest.mark.slow
def test_a_model_that_appears_within_the_grace_period_runs_its_lines(valkey_url: str, queue: Queue) -> None:
    """Its lines are submitted last, and are the last in the output file."""
    register(queue, "m")
    with batching(valkey_url, queue.name, unknown_model_s=HOUR_S) as (_, client):
        batch_id = start(client, lines_of(*(["late", "m"] * 20))).id
        eventually(
            lambda: (client.batches.retrieve(batch_id).request_counts or Batch).completed == 20,
            "the other model's lines",
        )
        with scripted_worker(valkey_url, queue.name, models=("late",)):
            register(queue, "late")
            batch = end_of(client, batch_id)
        made = outputs_of(client, batch)
        assert set(made[:20]) == {f"r{number}" for number in range(1, 40, 2)}
        assert set(made[20:]) == {f"r{number}" for number in range(0, 40, 2)}
        texts = [
            row["response"]["body"]["choices"][0]["text"] for row in rows_of(client, batch.output_file_id)
        ]
        assert texts == [name.replace("r", "p") for name in made]
        assert batch.error_file_id is None


@pytest.mark.slow
def test_a_gateway_restart_keeps_the_decision_on_unknown_models(valkey_url: str, queue: Queue) -> None:
    """The model appears after the decision: the failed lines must not run as well."""
    register(queue, "m")
    settings: dict[str, Any] = {"unknown_model_s": 0.0, "models": ["away"]}
    with scripted_worker(valkey_url, queue.name):
        with (
            gateway_process(valkey_url, queue.name, **settings) as (served, process),
            connect(served) as client,
        ):
            batch_id = start(client, lines_of(*(["m", "nope", "away"] * 10))).id
            eventually(lambda: record_of(queue, batch_id).get("is_final") == "1", "the decision")
            process.kill()
        register(queue, "nope")
        with gateway(valkey_url, queue.name, **settings) as served, connect(served) as client:
            before = record_of(queue, batch_id)["token"]
            eventually(lambda: record_of(queue, batch_id)["token"] > before, "the takeover")
            with scripted_worker(valkey_url, queue.name, models=("away", "nope")):
                batch = end_of(client, batch_id)
            assert batch.status == "completed"
            wrong = [f"r{number}" for number in range(30) if number % 3 == 1]
            assert codes_of(client, batch) == dict.fromkeys(wrong, (404, "model_not_found"))
            assert set(outputs_of(client, batch)) == {f"r{number}" for number in range(30) if number % 3 != 1}
    assert int(queue.client.hget(f"{queue.prefix}counts", "succeeded") or 0) == 20


@pytest.mark.slow
def test_a_gateway_restart_before_the_decision_ends_the_batch(valkey_url: str, queue: Queue) -> None:
    register(queue, "m")
    with scripted_worker(valkey_url, queue.name):
        with (
            gateway_process(valkey_url, queue.name, unknown_model_s=HOUR_S) as (served, process),
            connect(served) as client,
        ):
            batch_id = start(client, lines_of(*(["m", "nope"] * 10))).id
            eventually(lambda: "nope" in waiting_models(client, batch_id), "the model that it waits for")
            process.kill()
        with gateway(valkey_url, queue.name, unknown_model_s=0.0) as served, connect(served) as client:
            batch = end_of(client, batch_id)
            assert len(codes_of(client, batch)) == len(outputs_of(client, batch)) == 10


def test_a_cancelled_batch_ends_its_lines_for_an_unknown_model(valkey_url: str, queue: Queue) -> None:
    with gateway(valkey_url, queue.name) as served, connect(served) as client:
        batch_id = start(client, lines_of("nope", "m")).id
        eventually(lambda: len(waiting_models(client, batch_id)) == 2, "the models that it waits for")
        client.batches.cancel(batch_id)
        batch = end_of(client, batch_id)
        assert batch.status == "cancelled"
        errors = rows_of(client, batch.error_file_id)
        assert [row["error"]["code"] for row in errors] == ["batch_cancelled"] * 2


def test_a_batch_expires_when_no_worker_came(valkey_url: str, queue: Queue) -> None:
    """A window is at least an hour, so the batch is opened as if by a gateway an hour ago."""
    with gateway(valkey_url, queue.name) as served, connect(served) as client:
        now = int(time.time())
        about = {
            "input_file_id": upload(client, lines_of("nope", "m")), "endpoint": "/v1/completions",
            "completion_window": "1h", "metadata": None, "created_at": now - 3600, "expires_at": now,
            "output_ttl_s": HOUR_S, "priority": "low", "models": None, "api_key": None,
        }  # fmt: skip
        batch_id = f"batch_{secrets.token_hex(12)}"
        create = api_batches.create(
            queue.name,
            batch_id,
            "default",
            about["input_file_id"],
            json.dumps(about),
            window_s=60.0,
            max_open=9,
        )
        assert queue.run(create) == "created"
        batch = end_of(client, batch_id)
        assert batch.status == "expired"
        errors = rows_of(client, batch.error_file_id)
        assert [row["error"]["code"] for row in errors] == ["batch_expired"] * 2


def test_a_worker_that_has_just_registered_is_found(queue: Queue, valkey_url: str) -> None:
    """The gateway checks the registry again before it reports an unknown model."""
    with gateway(valkey_url, queue.name) as served:
        get = lambda path: httpx.get(f"{served.base_url}/{path}", timeout=PATIENCE_S)  # noqa: E731
        assert get("models").json()["data"] == []
        register(queue, "first")
        assert [model["id"] for model in get("models").json()["data"]] == ["first"]
        register(queue, "second", adapters=("tuned",))
        assert get("models/second").status_code == 200
        register(queue, "third", adapters=("tuned2",))
        with scripted_worker(valkey_url, queue.name, models=("third",)):
            assert ask(served, "third").status_code == 200
        assert get("models/tuned2").status_code == 200
        assert code_of(ask(served, "none")) == (404, "model_not_found")
