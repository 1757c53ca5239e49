"""Compiles the kernels of decoder layers in several processes at once: within one, numba compiles one at a time.

What one process has compiled the others load from the disk. Processes that start together compile once: one does, the
others wait for it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numba
import torch
from numba.core import registry

from kernels import cpu_layer


class Part(NamedTuple):
    """One of the kernels that a layer is made of."""

    name: str
    """One of `cpu_layer.PARTS`."""
    is_int8: bool
    """Whether products are of 8-bit integers."""
    cache_dtype: torch.dtype

    def compile(self) -> None:
        """Compile it, or load it from the disk."""
        cpu_layer.compile_part(self.name, is_int8=self.is_int8, cache_dtype=self.cache_dtype)

    def command(self) -> list[str]:
        dtype = str(self.cache_dtype).removeprefix("torch.")
        return [sys.executable, "-m", __name__, self.name, str(int(self.is_int8)), dtype]


def compile_apart(parts: Sequence[Part], meanwhile: Callable[[], None]) -> None:
    """Compile parts in this process, which runs `meanwhile` first, and in others; at once if they are compiled.

    This only saves time: where nothing can be kept on the disk, or a process fails, who calls a part compiles it.
    """
    marker = Path(numba.config.CACHE_DIR) / f"compiled-{_fingerprint(parts)}"
    num_others = min(_num_cores(), len(parts)) - 1  # one is for this process, which takes parts as they do
    with _alone(marker.with_suffix(".lock")) as can_keep:
        if not can_keep or marker.exists() or num_others <= 0:
            meanwhile()
            return
        crew = _Crew(parts, num_others)
        try:
            meanwhile()
            crew.help()
        finally:
            crew.dismiss()
        if not crew.has_failed:
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
        """Take parts here as well, until none is left."""
        for part in self._taken():
            part.compile()
        for thread in self._threads:
            thread.join()

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
            child = _start(part)
            self._children.append(child)
            if self._is_dismissed:  # perhaps too late for `dismiss` to see it
                child.kill()
            if child.wait() != 0:
                self.has_failed = True

    def _taken(self) -> Iterator[Part]:
        while True:
            try:
                yield self._waiting.popleft()
            except IndexError:
                return


def _start(part: Part) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        part.command(),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _fingerprint(parts: Sequence[Part]) -> str:
    """Of what numba takes machine code for the same by: the CPU, the versions; and of which parts it is about."""
    target = registry.cpu_target.target_context.codegen().magic_tuple()
    facts = (sys.version, numba.__version__, target, *(part.command()[3:] for part in parts))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Inside: no other process is. False where no file can be written, and then others may be."""
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except (ImportError, OSError):
        yield False
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)  # dropped with the file, or with the process
        yield True


if __name__ == "__main__":
    name, is_int8, dtype = sys.argv[1:]
    Part(name, bool(int(is_int8)), getattr(torch, dtype)).compile()
