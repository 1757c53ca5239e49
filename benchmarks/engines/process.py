"""An engine's process as seen by the measuring process: started once, stopped in place while others run.

A stopped process (SIGSTOP, including all of its children) uses no CPU and spins on no lock. It resumes
immediately, with its weights and compiled code in memory. Passes of two engines can therefore follow each
other within seconds. Other comparisons are not valid on a machine whose speed changes from minute to minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.engines import peers
from benchmarks.engines.contenders import Contender
from benchmarks.measure import Ready, Request, Timing
from benchmarks.workloads import Workload

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 1800.0
"""vLLM compiles for minutes and OpenVINO exports weights the first time."""
PASS_LIMIT_S = 1800.0
EXIT_LIMIT_S = 20.0
LOG_TAIL = 3000


class EngineFailedError(Exception):
    """An engine's process exited, or had no output for too long; the message contains its last output."""


class EngineProcess:
    """One contender's process; a context manager that stops the process and its children on exit.

    It has a separate process group in this session: Ctrl-C reaches only this process, and one signal stops an
    engine with all its children. A guard waits for this process's end of a pipe to close, and kills the group
    if this process is killed. A stopped process cannot see requests, the end of its requests or the exit of
    its parent.
    """

    def __init__(self, contender: Contender, request: Request, directory: Path) -> None:
        self.contender = contender
        self.ready: Ready | None = None
        self._log = directory / f"{contender.name}.log"
        self._buffer = b""
        request_path = directory / f"{contender.name}.json"
        replace(request, options=request.options | dict(contender.options)).write(request_path)
        interpreter, environment = _interpreter(contender, request)
        self._answers, theirs = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [interpreter, "-m", contender.module, request_path, str(theirs)],
                cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=(theirs,), process_group=0,
            )  # fmt: skip
        os.close(theirs)
        self._guard = subprocess.Popen(
            ["sh", "-c", f"read _; kill -s KILL -- -{self._process.pid}"],
            stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_until_ready(self) -> Ready:
        """Load and warm up, then stop.

        Raises:
            EngineFailedError: the engine did not become ready.
        """
        self.ready = Ready(**self._receive(START_LIMIT_S))
        self._signal(signal.SIGSTOP)
        return self.ready

    def measure(self, workload: Workload) -> Timing:
        """Resume, run one pass, stop again.

        Raises:
            EngineFailedError: it exited, or exceeded the time limit.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(workload.to_json()).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        timing = Timing(**self._receive(PASS_LIMIT_S))
        self._signal(signal.SIGSTOP)
        return timing

    def peak_memory_bytes(self) -> int:
        """Return the sum of each process's peak memory; pages that they share count twice."""
        return sum(_peak_resident_bytes(each.pid) for each in family(psutil.Process(self._process.pid)))

    def processor_seconds(self) -> float:
        """CPU time of the process and everything that it started, in any group or session."""
        return processor_seconds(psutil.Process(self._process.pid))

    def close(self) -> None:
        """Let the process exit at the end of its requests, then kill the remaining processes."""
        if self._answers < 0:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._signal(signal.SIGCONT)
        try:
            self._process.wait(EXIT_LIMIT_S if self.ready is not None else 0)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._guard.communicate()
            self._process.wait()
            os.close(self._answers)
            self._answers = -1

    def _receive(self, limit_s: float) -> dict[str, Any]:
        give_up = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            # A child of the engine can hold the pipe open after the engine has crashed, so check the process
            # as well.
            readable, _, _ = select.select([self._answers], [], [], 1.0)
            if readable:
                chunk = os.read(self._answers, 1 << 20)
                if not chunk:
                    raise self._failure("ended")
                self._buffer += chunk
            elif self._process.poll() is not None:
                raise self._failure("ended")
            elif time.monotonic() > give_up:
                raise self._failure(f"said nothing for {limit_s:.0f} s")
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _failure(self, what: str) -> EngineFailedError:
        if what == "ended":
            what = f"ended with exit code {self._process.wait(EXIT_LIMIT_S)}"
        tail = self._log.read_text(errors="replace")[-LOG_TAIL:]
        return EngineFailedError(f"{self.contender.name} {what}:\n{tail}")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _interpreter(contender: Contender, request: Request) -> tuple[Path, dict[str, str] | None]:
    if contender.peer is None:
        return Path(sys.executable), dict(os.environ) | dict(contender.environment)
    found = contender.peer.python()
    assert found is not None, "available_contenders() lets peers through only when their environment works"
    environment = peers.process_environment(request.kv_cache_memory_bytes) | dict(contender.environment)
    return found, environment


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def processor_seconds(process: psutil.Process) -> float:
    """CPU time of the process and its children."""
    return float(sum(sum(member.cpu_times()[:2]) for member in family(process)))


def _peak_resident_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) * 1024
