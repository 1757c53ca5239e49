"""The gateway's benchmark at a small size: every path responds, and failed starts report the reason."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from benchmarks.engines.contenders import Contender
from benchmarks.gateway import __main__ as gateway
from benchmarks.gateway import bare
from benchmarks.gateway.processes import Server
from benchmarks.gateway.rounds import Figures
from benchmarks.gateway.tables import table
from tests.worker.harness import eventually


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gateway", *arguments, "--out", str(path)])
    assert gateway.main() == 0
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_every_way_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--requests", "3", "--rounds", "2", "--concurrency", "1", "2", "--max-tokens", "4"]
    rows = run(monkeypatch, tmp_path / "gateway.json", *arguments)
    ways = ["direct", "gateway", "gateway, streamed"]
    loads = [f"{count} at once" for count in (1, 2)]
    assert [(row["way"], row["load"]) for row in rows] == [(way, load) for load in loads for way in ways]
    for row in rows:
        assert 0 < row["first_token_ms"] <= row["mean_ms"] <= row["p99_ms"] * 1.001
        parts = {"worker", "redis", "client"} | ({"gateway"} if row["way"] != "direct" else set())
        assert set(row["cpu_ms"]) == parts
        assert (row["per_token_ms"] is not None) == (row["way"] == "gateway, streamed")
    assert "compared" in capsys.readouterr().out


def test_the_share_of_the_bare_engine_stands_beside_the_goal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Contender("counting", "tests.benchmarks.counting_engine", "counts")
    with bare.bare_engine("none", [[1, 2], [3]], 5, tmp_path, engine) as counting:
        alone = counting.measure([[4, 5], [6]])
    assert alone.tokens_per_s > 0
    figures = dict.fromkeys(("mean_ms", "p50_ms", "p99_ms", "first_token_ms", "first_token_p99_ms"), 1.0)
    ways = [
        Figures(
            name,
            "1 at once",
            1.0,
            alone.tokens_per_s / 2,
            **figures,
            is_streamed=name != "direct",
            per_token_ms=None,
            bare=alone,
        )
        for name in ("direct", "gateway, streamed")
    ]
    Console(width=240).print(table(ways, Namespace(model="none", requests=2, max_tokens=5, prompt_tokens=2)))
    assert re.search(
        r"gateway, streamed .* \+0\.00 over direct, 50\.0% of bare \(goal 85%\)", capsys.readouterr().out
    )


VLLM_STUB = """
import argparse, http.server, json

parser = argparse.ArgumentParser()
for name in ("--model", "--served-model-name", "--host", "--port", "--dtype", "--max-model-len"):
    parser.add_argument(name)
parser.add_argument("--disable-uvicorn-access-log", action="store_true")
given = parser.parse_args()
assert given.dtype == "bfloat16"

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": given.served_model_name}]}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["ignore_eos"] and len(asked["prompt"]) == 4
        event = b'data: {"choices":[{"text":"x"}]}\\n\\n' * asked["max_tokens"]
        self.answer(event + b'data: {"usage":{"completion_tokens": %d}}\\n\\ndata: [DONE]\\n\\n' % asked["max_tokens"])

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass

http.server.ThreadingHTTPServer((given.host, int(given.port)), Handler).serve_forever()
"""


@pytest.mark.slow
def test_both_servers_get_the_same_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server of this interpreter replaces vLLM's."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server").with_suffix(".py").write_text(VLLM_STUB)
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PAGEMILL_BENCH_VLLM_ENV", str(tmp_path / "environment"))
    arguments = ["--vllm", "--requests", "4", "--rounds", "2", "--max-tokens", "3", "--prompt-tokens", "4"]
    rows = run(monkeypatch, tmp_path / "gateway.json", *arguments, "--concurrency", "2", "--rate", "50")
    assert [(row["way"], row["load"]) for row in rows] == [
        (f"{server}, streamed", load)
        for load in ("2 at once", "50 requests/s")
        for server in ("gateway", "vLLM")
    ]
    for row in rows:
        assert set(row["cpu_ms"]) == {
            "client",
            *(["vLLM"] if row["way"].startswith("vLLM") else ["gateway", "worker", "redis"]),
        }
    assert "goal 2 x" in capsys.readouterr().out


@pytest.mark.slow
def test_without_vllm_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_BENCH_VLLM_ENV", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["gateway", "--vllm"])
    with pytest.raises(SystemExit, match="--install-peers"):
        gateway.main()


@pytest.mark.slow
def test_a_worker_that_can_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    monkeypatch.setattr(sys, "argv", ["gateway", "--model", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"(?s)worker ended with 2:.*unheard-of"):
        gateway.main()


def test_a_server_that_spins_sleeps_beside_the_others() -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        watched = psutil.Process(process.pid)
        os.killpg(process.pid, signal.SIGSTOP)
        eventually(lambda: watched.status() == psutil.STATUS_STOPPED, "its first sleep")
        with Server("vLLM", 0, watched, sleeps=True).awake():
            eventually(lambda: watched.status() == psutil.STATUS_SLEEPING, "its turn")
        eventually(lambda: watched.status() == psutil.STATUS_STOPPED, "the others' turn")
    finally:
        process.kill()
        process.wait()
