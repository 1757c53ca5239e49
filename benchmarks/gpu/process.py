"""A process for the sections of `benchmarks.gpu` that touch the device, so that none of them can take the rest along.

An illegal access leaves its process without a usable device, and a kernel that hangs never returns: here either ends
one process, which the next section replaces. Rows arrive as they are made, so what a section had found is kept.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

Row = dict[str, Any]
Argument = TypeVar("Argument")

_SECONDS_TO_END = 5.0


class SectionFailed(Exception):
    """A section raised, ran out of time, or its process ended."""


class DeviceProcess:
    """Runs one section after another; starts on first use, and again after a failure."""

    def __init__(self) -> None:
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def rows(
        self, run: Callable[[Argument], Iterable[Row]], argument: Argument, timeout_s: float
    ) -> Iterator[Row]:
        """The rows of `run(argument)`, both of which can be pickled. Raises `SectionFailed`."""
        deadline = time.monotonic() + timeout_s
        try:
            connection = self._connected()
            connection.send((run, argument))
            while True:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise SectionFailed(f"not done after {timeout_s:.0f} s")
                kind, content = connection.recv()
                if kind == "end":
                    return
                if kind == "error":
                    raise SectionFailed(content)
                yield content
        except (EOFError, OSError) as error:
            self.stop()
            raise SectionFailed(f"its process has ended: {error!r}") from error
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the process, and with it whatever it has started."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is None or process.pid is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # should it have had no time for a group of its own
        process.join(_SECONDS_TO_END)

    def _connected(self) -> Connection:
        if self._connection is None:
            # Spawned: a process that has used CUDA can't be forked.
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,))
            self._process.start()
            theirs.close()  # or its end would never be noticed
        return self._connection


def _serve(connection: Connection) -> None:
    os.setpgid(0, 0)  # the processes that a section starts are in it too
    while True:
        try:
            run, argument = connection.recv()
        except EOFError:
            return
        try:
            for row in run(argument):
                connection.send(("row", row))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # the engines' processes need the memory
        except Exception as error:
            traceback.print_exc()
            connection.send(("error", f"{type(error).__name__}: {error}".strip().splitlines()[0]))
            return
        connection.send(("end", None))
