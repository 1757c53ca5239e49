"""`pagemill up` as a process, and its child processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.worker.harness import PATIENCE_S, eventually

QUICK = ("lease_s=1.5", "renew_s=0.3", "checkpoint_s=0.1", "max_num_seqs=16")


class Up:
    """A supervisor on separate ports."""

    def __init__(self, directory: Path, url: str | None, queue: str, *words: str, **variables: str) -> None:
        self.run_dir = directory / "run"
        self.log_path = directory / "up.log"
        command = [sys.executable, "-m", "pagemill", "up", "--run-dir", str(self.run_dir), "--queue", queue]
        for flag in ("--http-port", "--gateway-port", "--exporter-port"):
            command += [flag, "0"]
        options = [word for option in QUICK for word in ("--option", option)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PAGEMILL_STATE_DIR": str(directory / "state")}
        if url is not None:
            environment["PAGEMILL_REDIS_URL"] = url
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *options, *words],
                stdout=log,
                stderr=log,
                env=environment | variables,
                start_new_session=True,
            )
        self.seen: set[int] = set()
        """Every child that `status` has named."""

    def status(self) -> dict[str, Any]:
        """The state file's document: faster than the command."""
        try:
            document: dict[str, Any] = json.loads((self.run_dir / "state.json").read_text())
        except (OSError, ValueError):
            return {"state": "gone", "members": [], "processes": []}
        if document["pid"] != self.process.pid:
            return {"state": "gone", "members": [], "processes": []}  # of one that was killed
        self.seen |= {pid for pid, _ in document["processes"]}
        return document

    def members(self) -> dict[str, dict[str, Any]]:
        return {member["name"]: member for member in self.status()["members"]}

    def wait_ready(self, patience_s: float = PATIENCE_S) -> dict[str, dict[str, Any]]:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log()
            return self.status()["state"] == "ready"

        eventually(is_ready, f"all to be ready, as {self.log_path} tells", patience_s)
        return self.members()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command to the supervisor."""
        command = [sys.executable, "-m", "pagemill", "up", *words, "--run-dir", str(self.run_dir)]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def lines(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log())

    def close(self) -> None:
        self.status()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)
        for pid in self.seen:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


Start = Callable[..., Up]


@pytest.fixture
def start(valkey_url: str, queue_name: str, tmp_path: Path) -> Iterator[Start]:
    """Start supervisors of echo workers; remaining processes are killed at the end."""
    started: list[Up] = []

    def begin(*words: str, url: str | None = valkey_url, model: str = "echo:5", **variables: str) -> Up:
        up = Up(tmp_path, url, queue_name, "--model", model, *words, **variables)
        started.append(up)
        return up

    yield begin
    for up in started:
        up.close()
