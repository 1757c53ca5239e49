"""The gateway's line per request, and the options of its log."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from pagemill.producer.gateway import completions
from tests.conftest import ROOT
from tests.producer.gateway.serving import gateway
from tests.worker.harness import PATIENCE_S, eventually

SECRET = "a word that no log may hold"


def test_each_request_has_a_line_without_its_prompt(
    valkey_url: str, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with gateway(valkey_url, queue_name) as served:
        refused = httpx.post(
            f"{served.base_url}/completions", json={"model": "nobody", "prompt": SECRET}, timeout=PATIENCE_S
        )
        lost = httpx.get(f"{served.base_url}/files/{SECRET.replace(' ', '-')}", timeout=PATIENCE_S)
        unknown = httpx.get(f"{served.url}/somewhere?{SECRET}", timeout=PATIENCE_S)
        served.is_alive()
    lines = [record for record in caplog.records if record.getMessage() == "request"]
    told = [(line.method, line.route, line.status, line.levelname) for line in lines]  # type: ignore[attr-defined]
    assert told == [
        ("POST", "/v1/completions", 503, "WARNING"),
        ("GET", "/v1/files/{file_id}", 404, "INFO"),
        ("GET", "(none)", 404, "INFO"),
        ("GET", "/readyz", 200, "DEBUG"),
    ]
    answers = (refused, lost, unknown)
    assert [line.request_id for line in lines[:3]] == [answer.headers["x-request-id"] for answer in answers]  # type: ignore[attr-defined]
    assert all(line.seconds >= 0 for line in lines)  # type: ignore[attr-defined]
    assert not any(
        SECRET in repr(vars(record)) for record in caplog.records if record.name.startswith("pagemill")
    )


def test_a_bug_is_logged_with_its_traceback(
    valkey_url: str, queue_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(completions, "answer", broken)
    with gateway(valkey_url, queue_name) as served:
        answer = httpx.post(f"{served.base_url}/completions", json={"prompt": SECRET}, timeout=PATIENCE_S)
        served.is_alive()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    [record] = [record for record in caplog.records if record.name.startswith("pagemill") and record.exc_info]
    assert answer.headers["x-request-id"] in record.getMessage()
    assert "in broken" in logging.Formatter().formatException(record.exc_info)  # type: ignore[arg-type]
    assert SECRET not in logging.Formatter().format(record)


@pytest.mark.slow
def test_the_command_writes_objects(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    log = tmp_path / "gateway.log"
    command = [
        sys.executable, "-m", "pagemill", "gateway", "--no-keys", "--port", "0", "--redis-url", valkey_url,
        "--queue", queue_name, "--log-format", "json", "--log-level", "debug",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file)
    try:
        url = eventually(
            lambda: re.search(r"http://127\.[^\s\"/]*", log.read_text()),
            "its address",
        )
        ready = f"{url[0]}/readyz"

        def answers() -> bool:
            try:
                return httpx.get(ready, timeout=PATIENCE_S).status_code == 200
            except httpx.TransportError:
                return False

        eventually(answers, "its answer")
        eventually(lambda: '"route"' in log.read_text(), "the request's line")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (request, *_) = [line for line in lines if line["message"] == "request"]
    assert (request["method"], request["route"], request["status"]) == ("GET", "/readyz", 200)
    assert request["queue"] == queue_name


@pytest.mark.slow
def test_a_drain_says_what_is_under_way(
    valkey_url: str, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that waits for a worker keeps the gateway running for its drain time."""
    statuses: list[int] = []
    with caplog.at_level(logging.INFO):
        with gateway(valkey_url, queue_name, models=("m",), drain_s=1) as served:

            def ask() -> None:
                asked = {"model": "m", "prompt": SECRET}
                statuses.append(
                    httpx.post(f"{served.base_url}/completions", json=asked, timeout=60).status_code
                )

            asking = threading.Thread(target=ask)
            asking.start()
            eventually(lambda: "pagemill_gateway_requests_in_flight 2" in served.metrics(), "the request")
        asking.join(PATIENCE_S)
    told = [record.getMessage() for record in caplog.records if record.msg.startswith("stopping: ")]
    assert told[0] == "stopping: requests in progress: 1; they have 1 s from the start"
    assert statuses == [503]
