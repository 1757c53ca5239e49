"""The gateway's benchmark in small: every way answers, and what fails to start says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import gateway, report
from tests.worker.harness import eventually


def test_every_way_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.json"
    monkeypatch.setattr(report, "result_path", lambda name, now: path)
    arguments = ["--requests", "3", "--rounds", "2", "--concurrency", "1", "2", "--max-tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["gateway", *arguments])
    assert gateway.main() == 0
    rows = json.loads(path.read_text())["rows"]
    ways = ["direct", "gateway", "gateway, streamed"]
    assert [(row["way"], row["concurrency"]) for row in rows] == [(way, n) for n in (1, 2) for way in ways]
    for row in rows:
        assert 0 < row["first_token_ms"] <= row["mean_ms"] <= row["p99_ms"] * 1.001
        assert (row["server_cpu_ms"] is None) == (row["way"] == "direct")
    assert "over direct" in capsys.readouterr().out


def test_a_worker_that_can_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    monkeypatch.setattr(sys, "argv", ["gateway", "--model", str(tmp_path), "--no-write"])
    with pytest.raises(SystemExit, match=r"(?s)worker ended with 2:.*unheard-of"):
        gateway.main()


def test_a_way_that_spins_sleeps_beside_the_others() -> None:
    async def ask(number: int) -> float:
        return 0.0

    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        watched = psutil.Process(process.pid)
        os.killpg(process.pid, signal.SIGSTOP)
        eventually(lambda: watched.status() == psutil.STATUS_STOPPED, "its first sleep")
        with gateway._awake(gateway.Way("vLLM", ask, watched, sleeps=True)):
            eventually(lambda: watched.status() == psutil.STATUS_SLEEPING, "its turn")
        eventually(lambda: watched.status() == psutil.STATUS_STOPPED, "the others' turn")
    finally:
        process.kill()
        process.wait()
