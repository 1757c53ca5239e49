"""A cascade whose last model belongs to another API: the budget, the key, and all failures of the API."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.dataset import remote_model
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.tables.rows import open_source
from pagemill.producer.wire.schema.keys import lane_model
from tests.producer.dataset.labels.test_cascade import Workers, best, gold, pipeline, rows, says
from tests.producer.scripted_worker import scripted_worker

KEY = "sk-a-secret-key"
TOKENS = 300
"""The tokens that the API counts for each request; up to twice as many are reserved."""
RUN = """
import sys
from pagemill import Producer
from pagemill.producer.dataset.pipeline import Pipeline
url, queue, source, out, model, budget = sys.argv[1:]
with Producer(url, queue=queue) as producer:
    pipeline = Pipeline("{{ text }}", model="small", chat=False, choices=list("abc"), label_probs="product")
    pipeline.run(source, out=out, producer=producer, escalate_below=1.0, to=model, api_budget=int(budget))
"""


class Api:
    """The API's responses. Tests change the fields while it runs."""

    def __init__(self) -> None:
        self.url = ""
        self.faults: list[str] = []
        """The faults of the next requests; later requests succeed."""
        self.always = ""
        self.delay_s = 0.0
        self.states_usage = True
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.answered: Counter[str] = Counter()
        self.tokens = 0
        self.end = threading.Event()

    @property
    def model(self) -> str:
        return f"openai:{self.url}/v1/some/big"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: Api

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.api.answered["redirected"] += 1
        self._send(200, b"{}")

    def do_POST(self) -> None:
        api = self.api
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        api.bodies.append(body)
        api.keys.add(self.headers.get("authorization"))
        fault = api.always or (api.faults.pop(0) if api.faults else "")
        time.sleep(api.delay_s)
        text = body["messages"][-1]["content"]
        label = json.dumps({"label": best(says("big", text))[0]})
        if fault == "old_field" and "max_tokens" in body:
            self._send(400, b'{"error": {"message": "use max_completion_tokens"}}')
        elif fault.isdigit():
            location = {"location": f"{api.url}/elsewhere"} if fault == "302" else {}
            self._send(int(fault), b"{}", {"retry-after": "0"} | location)
        elif fault == "reset":
            self.close_connection = True
        elif fault == "invalid":
            self._send(200, b"{")
        elif fault == "endless":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while not api.end.is_set():
                    self.wfile.write(b"x" * 65536)
            self.close_connection = True
        else:
            api.answered[text] += 1
            api.tokens += TOKENS
            content = {"other": "none of them", "plain": json.loads(label)["label"]}.get(fault, label)
            usage = (
                {"usage": {"prompt_tokens": TOKENS - 5, "completion_tokens": 5}} if api.states_usage else {}
            )
            self._send(200, json.dumps({"choices": [{"message": {"content": content}}]} | usage).encode())

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def read(out: Path) -> list[dict[str, Any]]:
    lines = [row.fields or {} for row in open_source(out).rows()]
    for line in lines:
        told = line["label_answers"]
        line["label_answers"] = json.loads(told) if isinstance(told, str) else told
    return lines


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    made = Api()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("ApiHandler", (Handler,), {"api": made}))
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    monkeypatch.setenv("PAGEMILL_API_KEY", KEY)
    yield made
    made.end.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def workers(valkey_url: str, queue_name: str) -> Iterator[Workers]:
    workers = Workers()
    with scripted_worker(valkey_url, queue_name, workers, ("small", "big", lane_model("small", "lora"))):
        yield workers


@pytest.fixture
def producer(valkey_url: str, queue_name: str, workers: Workers) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer:
        yield producer


def run(api: Api, producer: Producer, out: Path, count: int = 20, budget: int = 10**6, **options: Any) -> Any:
    given = {"escalate_below": 1.0, "to": api.model, "gold": "gold"} | options
    return pipeline().run(rows(count), out=out, producer=producer, api_budget=budget, **given)


@pytest.mark.parametrize(
    "name",
    ["out.jsonl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("out.csv", "out.parquet"))],
)
def test_rows_go_on_to_another_api(
    name: str, api: Api, producer: Producer, workers: Workers, tmp_path: Path
) -> None:
    out = tmp_path / name
    summary = run(api, producer, out, 40, escalate_below=0.7)
    passed = {row["text"] for row in rows(40) if best(says("small", row["text"]))[1] < 0.7}
    assert 0 < len(passed) < 40
    for line in read(out):
        model = "big" if line["text"] in passed else "small"
        assert line["label"] == best(says(model, line["text"]))[0]
        assert line["label_model"] == (api.model if line["text"] in passed else "small")
        assert (not line["label_prob"]) == (line["text"] in passed), "it states none"
    assert api.answered == dict.fromkeys(passed, 1)
    assert api.keys == {f"Bearer {KEY}"}
    assert {body["model"] for body in api.bodies} == {"some/big"}
    last = summary.as_json()["cascade"]["stages"][1]
    assert (last["rows"], last["prompt_tokens"] + last["completion_tokens"]) == (len(passed), api.tokens)
    right = sum(best(says("big", text))[0] == gold(text) for text in passed)
    assert last["accuracy"] == right / len(passed)
    assert KEY not in "".join(path.read_bytes().decode("latin-1") for path in tmp_path.iterdir())
    run(api, producer, out, 40, escalate_below=0.7)
    assert set(api.answered.values()) == {1}, "something was paid for twice"
    assert set(workers.ran.values()) == {1}


def test_the_budget_bounds_the_tokens_and_more_of_it_does_the_rest(
    api: Api, producer: Producer, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    summary = run(api, producer, out, budget=5000, max_errors=0)
    assert 0 < api.tokens <= 5000
    lines = read(out)
    asked = [line for line in lines if line["label_model"] == api.model]
    kept = [line for line in lines if line["label_model"] == "small"]
    assert (len(asked), len(kept)) == (api.tokens // TOKENS, 20 - api.tokens // TOKENS)
    for line in kept:
        assert line["label"] == best(says("small", line["text"]))[0]
        assert line["label_answers"][1]["error"].startswith("budget_exhausted: ")
    assert summary.stages is not None
    assert summary.stages.as_json()["stages"][1]["failed"] == {"budget_exhausted": len(kept)}
    before = api.tokens
    run(api, producer, out, budget=5000)
    assert api.tokens == before, "the tokens of the finished output count"
    run(api, producer, out, budget=10**6)
    assert {line["label_model"] for line in read(out)} == {api.model}
    assert set(api.answered.values()) == {1}


def test_tokens_that_the_api_does_not_state_count_in_full(
    api: Api, producer: Producer, tmp_path: Path
) -> None:
    api.states_usage = False
    run(api, producer, tmp_path / "out.jsonl", budget=2000)
    assert 0 < len(api.bodies) <= 2000 // TOKENS - 1


@pytest.mark.parametrize(
    ("fault", "is_answered"),
    [
        ("429", True), ("503", True), ("old_field", True), ("plain", True), ("400", True), ("500", False),
        ("302", False), ("reset", False), ("invalid", False), ("endless", False), ("other", False),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_request_that_fails_leaves_the_first_answer(
    fault: str, is_answered: bool, api: Api, producer: Producer, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    api.faults = [fault]
    run(api, producer, out, 5)
    assert sum(line["label_model"] == "small" for line in read(out)) == (not is_answered)
    assert "redirected" not in api.answered
    run(api, producer, out, 5)
    assert {line["label_model"] for line in read(out)} == {api.model}, "the same command tries again"


def test_an_api_that_rejects_the_key_is_not_asked_again(api: Api, producer: Producer, tmp_path: Path) -> None:
    api.always = "401"
    run(api, producer, tmp_path / "out.jsonl", 60)
    assert len(api.bodies) <= 2 * remote_model.CONCURRENCY
    lines = read(tmp_path / "out.jsonl")
    assert all("api_denied: the API answers HTTP 401" in line["label_answers"][1]["error"] for line in lines)


@pytest.mark.slow
def test_a_run_that_is_killed_keeps_to_its_budget(
    api: Api, valkey_url: str, queue_name: str, workers: Workers, tmp_path: Path
) -> None:
    """Requests that the API may have received before SIGKILL count."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(80)))
    command = [sys.executable, "-c", RUN, valkey_url, queue_name, str(source), str(out), api.model, "15000"]
    api.delay_s = 0.05
    for kill in (True, True, False):
        asked = len(api.bodies)
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        give_up = time.monotonic() + 60
        while kill and process.poll() is None and len(api.bodies) < asked + 10 and time.monotonic() < give_up:
            time.sleep(0.005)
        if kill:
            os.kill(process.pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if kill else 0), errors.decode()
    assert len(api.bodies) * TOKENS <= 15000
    assert len(read(out)) == 80
    assert sum(line["label_model"] == api.model for line in read(out)) >= 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": "openai:http://host/v1/big", "api_budget": None}, "set --api-budget"),
        ({"to": ["openai:http://host/v1/big", "big"]}, "only the last"),
        ({"to": "openai:ftp://host/v1/big"}, "openai:https://HOST/v1/MODEL"),
        ({"to": "openai:http://user@host/v1/big"}, "openai:https://HOST/v1/MODEL"),
        ({"to": "openai:http://host/v1/"}, "openai:https://HOST/v1/MODEL"),
        ({"to": "big"}, "--api-budget and --api-key-file are for"),
        (
            {"to": "openai:http://host/v1/big", "api_key_file": "/no/such/file"},
            "--api-key-file: the key file",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"api_budget": 10, "escalate_below": 0.5} | options
    with pytest.raises(DatasetError, match=says):
        pipeline().run(rows(2), out=tmp_path / "out.jsonl", producer=Producer("redis://127.0.0.1:1"), **given)
