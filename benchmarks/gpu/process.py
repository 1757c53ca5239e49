"""A process for the sections of `benchmarks.gpu`, so that a failing section does not stop the rest.

After an illegal access a process cannot use its device, and a kernel that hangs never returns. Either one
ends only one process, which the next section replaces. Rows are sent as they are created, so a section's
earlier results are kept. Output of sections and of the processes that they start goes to a log.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from benchmarks.gpu.section import Bench, Row, Skipped

_SECONDS_TO_END = 5.0
_LONGEST_POLL_S = 1e6


class SectionFailed(Exception):
    """A section raised, or its process exited."""


class OutOfTime(Exception):
    """A section was aborted at its time limit."""


class DeviceProcess:
    """Runs one section after another; starts on first use, and again after a failure."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def rows(self, run: Callable[[Bench], Iterable[Row]], bench: Bench) -> Generator[Row, None, None]:
        """Yield the rows of `run(bench)`, within `bench.seconds`; both can be pickled.

        Raises:
            SectionFailed, OutOfTime, Skipped: in each case after the rows so far.
        """
        deadline = time.monotonic() + bench.seconds
        try:
            connection = self._connected()
            connection.send((run, bench))
            while True:
                # No limit is infinity, which poll does not support.
                if not connection.poll(min(_LONGEST_POLL_S, max(0.0, deadline - time.monotonic()))):
                    raise OutOfTime
                kind, content = connection.recv()
                if kind == "end":
                    return
                if kind == "error":
                    raise SectionFailed(content)
                if kind == "skipped":
                    raise Skipped(content)
                yield content
        except Skipped:
            raise
        except (EOFError, OSError) as error:
            self.stop()
            raise SectionFailed(f"its process has ended: {error!r}") from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill the process and everything that it has started."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is None or process.pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # if it has not created its process group yet
        process.join(_SECONDS_TO_END)

    def _connected(self) -> Connection:
        if self._connection is None:
            # Spawned: a process that has used CUDA can't be forked.
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._log))
            self._process.start()
            theirs.close()  # otherwise its exit would never be detected
        return self._connection


def _serve(connection: Connection, log: Path) -> None:
    os.setpgid(0, 0)  # includes the processes that a section starts
    _print_to(log)
    while True:
        try:
            run, bench = connection.recv()
        except EOFError:
            return
        try:
            for row in run(bench):
                connection.send(("row", row))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # the engines' processes need the memory
        except Skipped as reason:
            connection.send(("skipped", str(reason)))
            continue
        except Exception as error:
            traceback.print_exc()
            connection.send(("error", f"{type(error).__name__}: {error}".strip().splitlines()[0]))
            return
        connection.send(("end", None))


def _print_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    os.close(file)
