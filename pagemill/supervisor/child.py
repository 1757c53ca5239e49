"""A child process: its environment, its output, its signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import psutil

from pagemill.producer.wire.process.dependent import dependent
from pagemill.supervisor.logs import LogStream
from pagemill.supervisor.notify import VARIABLES

Kind = Literal["worker", "gateway", "exporter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """The command of a child, and the address of its probes."""

    name: str
    kind: Kind
    arguments: tuple[str, ...]
    """Arguments of the command `pagemill`."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the supervisor's environment; secrets are here and not among the arguments."""
    url: str
    """The base URL of its probes and metrics."""
    devices: tuple[str, ...] = ()
    """Values of CUDA_VISIBLE_DEVICES."""
    threads: int | None = None
    """CPU threads; None: the child's own choice."""
    listener: int | None = None
    """A listening socket's file descriptor that it inherits, so that clients can connect while it is restarted."""

    @property
    def shares_nothing(self) -> bool:
        """Whether a successor can start while this one drains: it does not need its port or device."""
        return self.listener is not None


class ChildProcess:
    """A running child. It leads a separate session, so that Ctrl-C reaches only the supervisor.

    Start it on the main thread: the kernel stops it with the thread that started it.
    """

    def __init__(self, spec: ChildSpec, logs: LogStream) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        fds = () if spec.listener is None else (spec.listener,)
        self.spec = spec
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            dependent([sys.executable, "-m", "pagemill", *spec.arguments]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=fds,
            env=inherited | {"PYTHONUNBUFFERED": "1"} | dict(spec.environment),
        )
        assert self._process.stdout is not None
        self._pump = logs.pump(spec.name, self._process.stdout)
        self.identity = identity(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._pump.join(timeout=0.5)  # its last lines, before the message about its exit
        return code

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and its descendants by SIGKILL."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def identity(pid: int) -> float | None:
    """Return a process's creation time, which distinguishes it from a later one with this id; None: it has exited."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None
