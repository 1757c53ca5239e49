"""A worker of one's own for the time of a run: a child process, with an embedded server where none is given."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema.errors import PagemillError, RedisUnavailable
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.discovery import find_redis, state_dir
from pagemill.producer.wire.server.transport import SyncTransport

START_LIMIT_S = 600.0
"""Covers the packaged model's one-time conversion on a slow machine."""
STOP_LIMIT_S = 30.0
LOADING_PATIENCE_S = 60.0
"""How long a worker that is still loading may take to name its models."""
POLL_S = 0.1
LOG_LINES = 15

# Runs between fork and exec: a run that is killed, or whose terminal is closed, must not leave a model in memory. The
# kernel then sends SIGTERM, and the worker hands its jobs back. Linux only.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class WorkerFailed(PagemillError):
    """The worker did not start, or ended in the middle; the message ends with what it last wrote."""


class LocalWorker:
    """Runs `pagemill worker` as a child. As a context manager it ends it with SIGTERM, as an operator would.

    It is a process and not a thread, so that its step loop shares no interpreter with the caller's own work. On Linux
    it ends with the thread that made this, too.
    """

    def __init__(
        self,
        model: str,
        *,
        queue: str,
        url: str | None = None,
        state_dir: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """`state_dir`: where the embedded server keeps its data, where there is no `url`."""
        if importlib.util.find_spec("torch") is None:
            raise WorkerFailed("a worker needs more than a producer: pip install 'pagemill[worker]'")
        self._queue = queue
        self._url = url
        self._state_dir = state_dir
        self._log = tempfile.NamedTemporaryFile(prefix="pagemill-worker-", suffix=".log")  # noqa: SIM115
        command = [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid())]
        command += [sys.executable, "-m", "pagemill", "worker", "--model", model, "--queue", queue]
        if state_dir is not None:
            command += ["--state-dir", str(state_dir)]
        environment = dict(os.environ)
        if url is not None:
            # Not as an argument: a URL may hold a password, and arguments are everybody's to see.
            environment["PAGEMILL_REDIS_URL"] = url
        # A session of its own: Ctrl-C is handled by the caller, and the worker gets one SIGTERM.
        self._process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env=environment,
        )

    def wait_ready(self) -> tuple[str, WorkerInfo]:
        """The server's URL, and what the worker says of itself once it serves. Raises WorkerFailed."""
        give_up = time.monotonic() + START_LIMIT_S
        while time.monotonic() < give_up:
            self.check()
            with contextlib.suppress(RedisUnavailable):
                url = find_redis(self._url, self._state_dir)
                for info in live_workers(url, self._queue):
                    if info.pid == self._process.pid and info.state == "ready":
                        return url, info
            time.sleep(POLL_S)
        raise self._failed(f"the worker is not ready after {START_LIMIT_S:.0f} s")

    def check(self) -> None:
        """Raise WorkerFailed if the worker is gone."""
        if self._process.poll() is not None:
            raise self._failed(f"the worker ended with exit code {self._process.returncode}")

    def stop(self) -> int:
        """Returns the worker's exit code."""
        self._process.terminate()
        try:
            return self._process.wait(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _failed(self, reason: str) -> WorkerFailed:
        tail = Path(self._log.name).read_text(errors="replace").splitlines()[-LOG_LINES:]
        return WorkerFailed("\n".join([reason, *tail]))


def live_workers(url: str, queue: str) -> list[WorkerInfo]:
    """The workers of a queue. Raises RedisUnavailable."""
    with open_client(url, queue) as client:
        return SyncTransport(client).run(registry.workers(queue))


def serving_workers(url: str, queue: str, model: str, say: Callable[[str], None]) -> list[WorkerInfo]:
    """The workers that serve the model. One that is still loading may be about to: a second would halve the machine.

    Args:
        say: is told, once, when there is something to wait for.

    Raises RedisUnavailable.
    """
    give_up = time.monotonic() + LOADING_PATIENCE_S
    has_told = False
    while True:
        alive = live_workers(url, queue)
        serving = [info for info in alive if served_name(model) in info.models]
        is_loading = any(info.state == "loading" for info in alive)
        if serving or not is_loading or time.monotonic() > give_up:
            return serving
        if not has_told:
            say(f"waiting for the worker of queue {queue} to load its model")
            has_told = True
        time.sleep(POLL_S)


def served_name(model: str) -> str:
    """The name that a worker serves a model under: a directory's own name."""
    return Path(model).name if "/" in model else model


def has_server(url: str | None) -> bool:
    """Whether there is an address to connect to."""
    try:
        find_redis(url, state_dir())
    except RedisUnavailable:
        return False
    return True
