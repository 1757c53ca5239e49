"""Long operations report it on the screen."""

from __future__ import annotations

import io
import itertools
import logging
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from pagemill.cli import local_worker
from pagemill.cli.local_worker import LocalWorker, WorkerFailed
from pagemill.cli.terminal import waiting
from pagemill.cli.terminal.waiting import Waiting
from pagemill.common import report_interval
from pagemill.worker import long_wait, process
from tests.worker.harness import PATIENCE_S, QueueClient, WorkerProcess, eventually, process_settings


def lines(*states: str, is_short: bool = False) -> list[str]:
    out = io.StringIO()
    with Waiting("starting", Console(file=out), is_short=is_short) as wait:
        for state in states:
            wait.report(state)
    return out.getvalue().splitlines()


def test_news_is_a_line_and_the_rest_is_not() -> None:
    assert lines("loading", "loading", "", "compiling") == [
        "starting",
        "starting: loading",
        "starting: compiling",
    ]
    assert lines("loading", is_short=True) == []


def test_without_news_it_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_interval, "FIRST_S", 0.0)
    monkeypatch.setattr(report_interval, "LOG_S", 0.0)
    assert lines("loading", "loading") == ["starting", "starting: loading", "starting: loading"]
    assert lines("loading", "loading", is_short=True) == ["starting: loading", "starting: loading"]


def test_a_log_gets_an_unchanged_state_every_thirty_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    for module in (waiting, long_wait):
        monkeypatch.setattr(module, "time", clock)
    caplog.set_level(logging.INFO)
    out = io.StringIO()
    log = long_wait.LongWait(logging.getLogger("load"))
    with Waiting("starting", Console(file=out)) as wait:
        for clock.now in map(float, range(100)):
            wait.report()
            log.report("still loading, %.0f s by now", log.seconds)
    assert out.getvalue().splitlines() == ["starting", *(f"starting ({s} s)" for s in (30, 60, 90))]
    assert [record.args for record in caplog.records] == [(2.0,), (32.0,), (62.0,), (92.0,)]


def test_a_terminal_gets_a_spinner() -> None:
    out = io.StringIO()
    with Waiting("starting", Console(file=out, force_terminal=True)) as wait:
        wait.report("loading")
    assert "starting" in out.getvalue()
    assert "\x1b[?25h" in out.getvalue(), "the cursor is shown again"


@pytest.mark.slow
def test_a_worker_that_starts_says_what_it_does(valkey_url: str, queue_name: str) -> None:
    told: list[str] = []
    with LocalWorker("echo", queue=queue_name, url=valkey_url) as worker:
        worker.wait_ready(told.append)
    assert any(message.startswith("loading echo") for message in told), told


@pytest.mark.slow
def test_a_private_worker_leaves_the_port_of_the_environment_to_others(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("PAGEMILL_HTTP_PORT", str(taken.getsockname()[1]))
        with LocalWorker("echo", queue=queue_name, url=valkey_url) as worker:
            assert worker.wait_ready()[1].state == "ready"


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
    monkeypatch.setattr(report_interval, "FIRST_S", 0.0)
    monkeypatch.setattr(report_interval, "LOG_S", 0.0)
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


@pytest.mark.slow
@pytest.mark.parametrize("logs_progress", [True, False])
def test_local_worker_may_start_slowly_while_it_logs_progress(
    logs_progress: bool, valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two polls are further apart than half of the limit, as on a machine that stalls between them."""
    clock = itertools.count(step=0.6 * local_worker.SILENCE_LIMIT_S)
    fake = SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep)
    monkeypatch.setattr(local_worker, "time", fake)
    messages = itertools.count()
    with LocalWorker("echo", queue=queue_name, url=valkey_url) as worker:
        monkeypatch.setattr(worker, "_last_message", lambda: str(next(messages) if logs_progress else 0))
        if logs_progress:
            assert worker.wait_ready()[1].state == "ready"
        else:
            with pytest.raises(WorkerFailed, match="not ready and logged nothing for 600 s"):
                worker.wait_ready()
        monkeypatch.setattr(local_worker, "time", time)
