"""What takes long says so on the screen."""

from __future__ import annotations

import io
import logging
import signal
from pathlib import Path

import pytest
from rich.console import Console

from pagemill.cli.local_worker import LocalWorker
from pagemill.cli.terminal import waiting
from pagemill.cli.terminal.waiting import Waiting
from pagemill.worker import long_wait, process
from tests.worker.harness import PATIENCE_S, QueueClient, WorkerProcess, eventually, process_settings


def lines(*states: str, is_short: bool = False) -> list[str]:
    out = io.StringIO()
    with Waiting("starting", Console(file=out), is_short=is_short) as wait:
        for state in states:
            wait.tell(state)
    return out.getvalue().splitlines()


def test_news_is_a_line_and_the_rest_is_not() -> None:
    assert lines("loading", "loading", "", "compiling") == [
        "starting",
        "starting: loading",
        "starting: compiling",
    ]
    assert lines("loading", is_short=True) == []


def test_without_news_it_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "EVERY_S", 0.0)
    assert lines("loading", "loading") == ["starting", "starting: loading", "starting: loading"]
    assert lines("loading", "loading", is_short=True) == ["starting: loading", "starting: loading"]


def test_a_terminal_gets_a_spinner() -> None:
    out = io.StringIO()
    with Waiting("starting", Console(file=out, force_terminal=True)) as wait:
        wait.tell("loading")
    assert "starting" in out.getvalue()
    assert "\x1b[?25h" in out.getvalue(), "the cursor is shown again"


@pytest.mark.slow
def test_a_worker_that_starts_says_what_it_does(valkey_url: str, queue_name: str) -> None:
    told: list[str] = []
    with LocalWorker("echo", queue=queue_name, url=valkey_url) as worker:
        worker.wait_ready(told.append)
    assert any(message.startswith("loading echo") for message in told), told


class LoadingWorker:
    """Never done."""

    def __init__(self, signals: process.ShutdownSignals) -> None:
        self._signals = signals
        self._looks = 0

    def wait_ready(self, timeout: float, **_: object) -> bool:
        self._looks += 1
        if self._looks == 3:
            self._signals.asked.set()
        return False

    def failure(self) -> None:
        return None


def test_a_long_load_is_in_the_workers_own_output(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(long_wait, "EVERY_S", 0.0)
    caplog.set_level(logging.INFO)
    signals = process.ShutdownSignals()
    process._watch(LoadingWorker(signals), None, signals, None)  # type: ignore[arg-type]
    assert sum("still loading" in record.getMessage() for record in caplog.records) == 3


@pytest.mark.slow
def test_a_long_drain_says_how_many_jobs_run_on(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    client = QueueClient(valkey_url, queue_name)
    settings = process_settings(valkey_url, queue_name, model="echo:20", drain_grace_s=600, shutdown_s=900)
    worker = WorkerProcess(settings, tmp_path / "worker.log")
    try:
        (job_id,) = client.submit({"prompt": "x" * 1000, "max_tokens": 1000})
        eventually(lambda: client.status(job_id).state == "running", "its start", PATIENCE_S)
        worker.signal(signal.SIGTERM)
        eventually(lambda: "draining: 1 jobs run on" in worker.log(), "a word about the drain")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    finally:
        worker.kill()
        client.redis.close()
