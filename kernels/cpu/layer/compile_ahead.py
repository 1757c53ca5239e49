"""Compiles the kernels of decoder layers in several processes at once: within one, numba compiles one at a time.

What one process has compiled the others load from the disk. Processes that start together compile once: one does, the
others wait for it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

import numba
import torch
from numba.core import registry

from pagemill.kernels.cpu.jit import file_lock
from pagemill.kernels.cpu.layer import layer as cpu_layer
from pagemill.kernels.cpu.matmul.kinds import KindName

logger = logging.getLogger(__name__)

_LONGEST_S = 600.0
"""The longest a process waits for another that compiles the same kernels before it compiles them too."""
_REPORT_S = 15.0


class Part(NamedTuple):
    """One of the kernels that a layer is made of."""

    name: str
    """One of `cpu_layer.PARTS`."""
    kind: KindName
    """Of the products."""
    cache_dtype: torch.dtype

    def compile(self) -> None:
        """Compile it, or load it from the disk."""
        cpu_layer.compile_part(self.name, kind=self.kind, cache_dtype=self.cache_dtype)

    def arguments(self) -> list[str]:
        """Of a process that compiles it."""
        dtype = str(self.cache_dtype).removeprefix("torch.")
        return ["-m", __name__, self.name, self.kind, dtype]


def compile_apart(parts: Sequence[Part], meanwhile: Callable[[], None]) -> None:
    """Compile parts in this process, which runs `meanwhile` first, and in others; at once if they are compiled.

    This only saves time: where nothing can be kept on the disk, or a process fails, who calls a part compiles it.
    """
    marker = Path(numba.config.CACHE_DIR) / f"compiled-{_fingerprint(parts)}"
    num_others = min(_num_cores(), len(parts)) - 1  # one is for this process, which takes parts as they do
    if marker.exists() or num_others <= 0 or not _can_start_python():
        meanwhile()
        return
    with file_lock.hold(marker.with_suffix(".lock"), _LONGEST_S) as is_alone:
        if not is_alone or marker.exists():
            meanwhile()
            return
        crew = _Crew(parts, num_others)
        try:
            meanwhile()
            crew.help()
        finally:
            crew.dismiss()
        if not crew.has_failed:
            with suppress(OSError):
                marker.touch()


class _Crew:
    """Threads that take one part after the other, each to be compiled by a process of its own."""

    def __init__(self, parts: Sequence[Part], num_threads: int) -> None:
        self.has_failed = False
        self._is_dismissed = False
        self._waiting = deque(parts)
        self._children: list[subprocess.Popen[bytes]] = []
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def help(self) -> None:
        """Take parts here as well, until all are done."""
        for part in self._taken():
            part.compile()
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_REPORT_S)
                if thread.is_alive():
                    logger.info("still compiling, in another process")

    def dismiss(self) -> None:
        """Leave what has not been taken, and end what has."""
        self._is_dismissed = True
        self._waiting.clear()
        for child in self._children:
            child.kill()  # does nothing to those that have ended
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        for part in self._taken():
            try:
                child = _start(part)
            except OSError as error:
                self._report(part, str(error))
                continue
            with child:
                self._children.append(child)
                if self._is_dismissed:  # perhaps too late for `dismiss` to see it
                    child.kill()
                if child.wait() != 0 and not self._is_dismissed:
                    self._report(part, f"exit status {child.returncode}")

    def _report(self, part: Part, problem: str) -> None:
        self.has_failed = True
        command = shlex.join([sys.executable, *part.arguments()])
        logger.warning(
            "compiling a kernel apart failed (%s), so it will be compiled here: %s", problem, command
        )

    def _taken(self) -> Iterator[Part]:
        while True:
            try:
                yield self._waiting.popleft()
            except IndexError:
                return


def _start(part: Part) -> subprocess.Popen[bytes]:
    paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", *part.arguments()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,  # open as long as this process lives
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _can_start_python() -> bool:
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _fingerprint(parts: Sequence[Part]) -> str:
    """Of what numba takes machine code for the same by: CPU, versions, and place; and of which parts it is about."""
    target = registry.cpu_target.target_context.codegen().magic_tuple()
    facts = (sys.version, numba.__version__, target, __file__, *(part.arguments() for part in parts))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_with_parent() -> None:
    os.read(0, 1)  # not by `sys.stdin`, which an ending interpreter wants to lock
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    name, kind, dtype = sys.argv[1:]
    Part(name, cast(KindName, kind), getattr(torch, dtype)).compile()
