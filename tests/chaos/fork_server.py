"""Hundreds of worker processes, forked from a process that has imported everything, so each starts in milliseconds.

They are separate processes in every respect that matters here: own connections, killed by real signals. Their echo
model has faults that the real one does not have, each in the step that starts a prompt: the byte 7 at its end kills the
worker, the byte 8 makes the step hang, once per fork server, the byte 9 kills the device, and so does any prompt, as
often as the fork server specifies. On a dead device every step raises CUDA's error. (The canaries of an audit, which an
idle worker computes, have every byte, but end with others.)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pagemill.producer.wire.schema.outputs import Result
from tests.worker.harness import QueueClient, eventually

_SHOWN = 4000
"""Characters of the log of a crashed worker."""

_FORK_SERVER = """
import json, os, signal, sys
import time
from pagemill.engine.engine import Engine
from pagemill.engine.models.echo import EchoRunner
from pagemill.worker.config import WorkerConfig
from pagemill.worker.process import run_worker
launch = EchoRunner.launch
is_device_dead = False
def may(fault):
    for name in os.listdir(sys.argv[1]):
        if name.startswith(fault):
            try:
                os.unlink(os.path.join(sys.argv[1], name))
                return True
            except FileNotFoundError:
                pass
    return False
def faulty_launch(self, plan):
    global is_device_dead
    for row in plan.new_rows:
        last = row.token_ids[-1]
        if last == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        if last == 8 and may("hang"):
            time.sleep(3600)
        is_device_dead = is_device_dead or last == 9 or may("kill-device")
    if is_device_dead:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return launch(self, plan)
EchoRunner.launch = faulty_launch
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0), os.dup2(log, 1), os.dup2(log, 2)
        for name in ("stdout", "stderr"):
            setattr(sys, name, os.fdopen({"stdout": 1, "stderr": 2}[name], "w", buffering=1))
        code = 1
        try:
            code = run_worker(WorkerConfig.load(**order["settings"]))
        finally:
            os._exit(code)
    print(pid, flush=True)
"""


class ForkedWorker:
    """A worker process that is not our child: signals go to its id, and it has exited when the id no longer exists."""

    def __init__(self, pid: int, log_path: Path) -> None:
        self.pid = pid
        self.log_path = log_path

    @property
    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def signal(self, number: int) -> None:
        if self.is_alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, patience_s: float = 60.0) -> None:
        """Until it has exited."""
        give_up = time.monotonic() + patience_s
        while self.is_alive:
            assert time.monotonic() < give_up, f"worker {self.pid} does not end"
            time.sleep(0.005)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""


def check_alive(workers: list[ForkedWorker]) -> None:
    """Check that all run, and show the end of the log of one that does not."""
    for worker in workers:
        assert worker.is_alive, worker.log()[-_SHOWN:]


class ForkServer:
    """Forks workers of one queue. A context manager: at its end all of them are killed."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._directory = directory
        self._settings = settings
        self._spawned: list[ForkedWorker] = []
        self._faults = directory / "faults"
        self._faults.mkdir()
        (self._faults / "hang").touch()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORK_SERVER, str(self._faults)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def spawn(self, **settings: Any) -> ForkedWorker:
        """A worker with the settings of the fork server and these on top."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log_path = self._directory / f"worker-{len(self._spawned)}.log"
        order = {"log": str(log_path), "settings": self._settings | settings}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server has ended"
        worker = ForkedWorker(int(answer), log_path)
        self._spawned.append(worker)
        return worker

    def kill_devices(self, times: int) -> None:
        """The next steps, this many, that start a prompt kill the device of their worker, whichever it is."""
        for number in range(times):
            (self._faults / f"kill-device-{number}").touch()

    def taken_over(self, client: QueueClient, job_ids: list[str]) -> list[Result]:
        """The results of jobs whose worker is killed once it has started one, and which another worker takes over."""
        worker = self.spawn()

        def has_begun() -> bool:
            return any(client.status(job_id).progress.prompt_tokens_done for job_id in job_ids)

        eventually(has_begun, "a step")
        worker.kill()
        assert not all(client.status(job_id).done for job_id in job_ids)
        self.spawn()
        return client.results(job_ids)

    def logs(self) -> str:
        return "\n".join(worker.log() for worker in self._spawned)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in self._spawned:
            worker.signal(signal.SIGKILL)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait(30)
