"""A test run reports an unclosed connection where it was opened, and failures also when it is interrupted.

A killed run does not leave a server running.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.worker.harness import eventually

pytestmark = pytest.mark.slow

MODULE = """
import os, pathlib, time

def test_that_fails():
    assert "a" == "b"

def test_that_waits(own_valkey):
    pathlib.Path({mark!r}).write_text(str(own_valkey.process.pid))
    time.sleep(300)
"""

LEAK = """
import asyncio

def test_that_leaves_a_connection(own_valkey):
    async def connect():
        _, writer = await asyncio.open_connection("127.0.0.1", own_valkey.port)
        cycle = [writer]
        cycle.append(cycle)
    asyncio.run(connect())
"""


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", str(folder)]


@contextmanager
def run_until_it_waits(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A test run in the middle of a test, and the process id of that test's server."""
    mark = folder / "waiting"
    (folder / "test_waiting.py").write_text(MODULE.format(mark=str(mark)))
    output = subprocess.PIPE
    with subprocess.Popen(
        command(folder), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            eventually(lambda: mark.exists() and mark.read_text(), "the second test", patience_s=120)
            yield run, int(mark.read_text())
        finally:
            run.kill()


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2]


def test_an_interrupted_run_reports_its_failures(tmp_path: Path) -> None:
    with run_until_it_waits(tmp_path) as (run, server):
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=120)
        assert "test_that_fails" in output.partition("short test summary")[2], output
        assert not is_running(server)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_a_killed_run_leaves_no_server(tmp_path: Path) -> None:
    with run_until_it_waits(tmp_path) as (run, server):
        assert is_running(server)
        run.kill()
        eventually(lambda: not is_running(server), "the server to end")


def test_an_unclosed_connection_fails_the_module_that_opened_it(tmp_path: Path) -> None:
    for number, text in enumerate([LEAK, "def test_of_something_else():\n    pass\n"], 1):
        (tmp_path / f"test_{number}.py").write_text(text)
    run = subprocess.run(
        command(tmp_path), cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    summary = run.stdout.partition("short test summary")[2]
    assert "test_that_leaves_a_connection" in summary, run.stdout
    assert "2 passed, 1 error" in summary
