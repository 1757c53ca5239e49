"""The examples, run unchanged against a worker."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.worker.harness import running_worker, worker_config

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def worker(valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An echo worker on a replacement of the default queue."""
    monkeypatch.setenv("PAGEMILL_REDIS_URL", valkey_url)
    monkeypatch.setenv("PAGEMILL_MODEL", "echo")
    from pagemill import AsyncProducer, Producer

    for client in (Producer, AsyncProducer):
        defaults = dict(client.__init__.__kwdefaults__ or {})
        monkeypatch.setattr(client.__init__, "__kwdefaults__", defaults | {"queue": queue_name})
    with running_worker(worker_config(valkey_url, queue_name)) as worker:
        yield worker


def load(name: str) -> ModuleType:
    return importlib.reload(importlib.import_module(f"examples.{name}"))


def test_fastapi() -> None:
    with TestClient(load("fastapi_service").app) as client:
        asked = client.post("/questions", json={"text": "hello"})
        assert asked.status_code == 202
        answered = client.get(f"/questions/{asked.json()['id']}", params={"wait": 20})
        assert answered.json() == {"state": "succeeded", "text": "hello"}
        assert client.get("/questions/none-such").status_code == 404
        assert client.post("/questions", json={"text": "x", "max_tokens": 0}).status_code == 422
        with client.stream("POST", "/stream", json={"text": "token by token"}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line]
        assert "".join(event["text"] for event in events) == "token by token"
        assert events[-1] == {"type": "end", "text": "", "state": "succeeded"}


def test_fastapi_reports_jobs_that_did_not_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream and a poll of a cancelled job report its state and code; neither looks like a finished output."""
    example = load("fastapi_service")
    submit = example._submit

    async def cancelled(*args: Any, **fields: Any) -> str:
        job_id: str = await submit(*args, **fields)
        await example.queue.job(job_id).cancel()
        return job_id

    monkeypatch.setattr(example, "_submit", cancelled)
    with TestClient(example.app) as client:
        question = {"text": "hello " * 500, "max_tokens": 4000}
        with client.stream("POST", "/stream", json=question) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line]
        assert (events[-1]["type"], events[-1]["state"]) == ("end", "cancelled")
        assert events[-1]["error"]["code"] == "cancelled"
        asked = client.post("/questions", json=question).json()["id"]
        answered = client.get(f"/questions/{asked}", params={"wait": 20})
        assert (answered.status_code, answered.json()["detail"]["code"]) == (502, "cancelled")


def test_flask() -> None:
    example = load("flask_service")
    client = example.app.test_client()
    try:
        first = client.post("/questions", json={"text": "hello"}, headers={"Idempotency-Key": "k"})
        again = client.post("/questions", json={"text": "hello"}, headers={"Idempotency-Key": "k"})
        assert first.status_code == 202
        assert first.json == again.json
        found = client.get(f"/questions/{first.json['id']}")
        assert found.json == {"state": "succeeded", "text": "hello"}
        assert client.delete(f"/questions/{first.json['id']}").json == {"cancelled": False}
        assert client.get("/questions/none-such").status_code == 404
    finally:
        example.queue.close()


def test_fan_out() -> None:
    assert asyncio.run(load("fan_out").main(700)) == 700


def test_assistant(valkey_url: str, queue_name: str) -> None:
    """The echo model calls the function without being forced, up to the limit, since the prompt says so."""
    text, returned = load("assistant").answer('{"name": "current_time", "arguments": {}}')
    assert len(returned) == load("assistant").MAX_TURNS
    assert all(one.startswith("20") for one in returned)
    assert text.strip().startswith("20")


def test_the_page_on_labels(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "labels.md").read_text()
    block, _ = re.findall("```python\n(.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(block.replace('"smollm2"', '"echo"'), found)
    probs = found["result"].label_probs
    assert list(probs) == [" positive", " negative", " neutral"]
    assert sum(probs.values()) == pytest.approx(1.0)
    assert capsys.readouterr().out == f"{found['result'].label} {probs}\n"


def test_label_dataframe() -> None:
    example = load("label_dataframe")
    frame = example.REVIEWS.set_index(example.REVIEWS.index + 10)
    labels = example.label(frame, "text", ["good", "bad"])
    assert list(labels.index) == [10, 11, 12]
    assert set(labels) <= {"good", "bad"}
