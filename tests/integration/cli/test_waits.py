"""Commands that wait for a worker or a server report it: processes as users start them, killed with SIGKILL."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import RedisServer
from tests.integration.cli.test_run import RUN, environment, outputs, write_rows
from tests.worker.harness import PATIENCE_S, QueueClient, WorkerProcess, eventually, process_settings

pytestmark = pytest.mark.slow


class Command:
    """A `pagemill` process whose standard error is read continuously."""

    def __init__(self, folder: Path, settings: dict[str, str], *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagemill", *arguments], cwd=folder, env=settings, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def says(self, *words: str) -> None:
        """Wait for a line that contains all of these words."""

        def is_said() -> bool:
            assert self.process.poll() is None, self.lines
            return any(all(word in line for word in words) for line in list(self.lines))

        eventually(is_said, f"{words} in {self.lines}", PATIENCE_S)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._reader.join()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._reader.join()


@contextlib.contextmanager
def command(folder: Path, settings: dict[str, str], *arguments: str) -> Iterator[Command]:
    started = Command(folder, settings, *arguments)
    try:
        yield started
    finally:
        started.close()


def start_worker(url: str, queue: str, log: Path, model: str = "echo:20") -> WorkerProcess:
    return WorkerProcess(process_settings(url, queue, model=model), log)


def test_a_run_says_that_the_worker_and_the_server_died(
    own_valkey: RedisServer, queue_name: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "in.jsonl", 400)
    url = own_valkey.url
    worker = start_worker(url, queue_name, tmp_path / "worker.log")
    client = QueueClient(url, queue_name)
    eventually(lambda: any("echo" in info.models for info in client.workers()), "the worker", PATIENCE_S)
    with command(tmp_path, environment(url, queue_name), *RUN, "--model", "echo") as run:
        try:
            eventually(lambda: client.stats().counts.get("succeeded", 0) > 5, "the first rows", PATIENCE_S)
            worker.signal(signal.SIGKILL)
            own_valkey.kill()
            run.says("lost Redis, waiting")
            own_valkey.start()
            run.says("Redis answers again")
            run.says("no live worker", "serves echo", "wait for one")
        finally:
            worker.kill()
            again = start_worker(url, queue_name, tmp_path / "again.log", "echo:60")
        try:
            run.says("serves echo again")
            assert run.wait() == 0, run.lines
        finally:
            again.kill()
    client.redis.close()
    assert outputs(tmp_path / "out.jsonl") == [f"row {i}" for i in range(400)]


def test_a_quiet_run_says_what_it_would_wait_for_without_an_end(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    """The first model's worker is killed, and no worker serves the second model, whose name is mistyped."""
    write_rows(tmp_path / "in.jsonl", 40)
    worker = start_worker(valkey_url, queue_name, tmp_path / "worker.log", "echo")
    client = QueueClient(valkey_url, queue_name)
    eventually(lambda: any("echo" in info.models for info in client.workers()), "the worker", PATIENCE_S)
    labels = (
        "--choices", "a,b", "--label-probs", "mean", "--escalate-below", "1", "--to", "qwen33", "--quiet",
    )  # fmt: skip
    with command(tmp_path, environment(valkey_url, queue_name), *RUN, "--model", "echo", *labels) as run:
        try:
            run.says("no live worker", "serves qwen33", "jobs wait for one")
            assert not any("rows/s" in line for line in run.lines)
        finally:
            worker.kill()
            client.redis.close()


def test_a_run_ends_with_the_worker_that_it_started(tmp_path: Path, client: QueueClient) -> None:
    write_rows(tmp_path / "in.jsonl", 400)
    settings = environment(client.url, client.queue)
    with command(tmp_path, settings, *RUN, "--model", "echo:20", "--quiet") as run:
        eventually(lambda: client.stats().counts.get("succeeded", 0) > 5, "the first rows", PATIENCE_S)
        (child,) = psutil.Process(run.process.pid).children()
        child.kill()
        assert run.wait() == 1, run.lines
    said = "".join(run.lines)
    assert "the worker ended with exit code -9" in said
    assert "run the same command again" in said


@pytest.mark.parametrize(
    "waiting", [("result",), ("submit", "hello", "--model", "typo", "--wait")], ids=" ".join
)
def test_a_wait_for_one_job_says_that_no_worker_serves_it(
    tmp_path: Path, waiting: tuple[str, ...], client: QueueClient
) -> None:
    (job_id,) = client.submit({"prompt": "x", "model": "typo"})
    arguments = (*waiting, job_id) if waiting == ("result",) else waiting
    with command(tmp_path, environment(client.url, client.queue), *arguments) as wait:
        wait.says("waits: no live worker serves it (model typo)")


def test_a_batch_file_says_which_model_no_worker_serves(
    valkey_url: str, queue_name: str, tmp_path: Path
) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**body, "model": name}}
        for name in ("one", "two")
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with command(tmp_path, environment(valkey_url, queue_name), "batch", "run", "in.jsonl", "--quiet") as run:
        run.says("no live worker", "serves one", "1 job waits for one")
        run.says("no live worker", "serves two", "1 job waits for one")
