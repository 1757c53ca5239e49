"""Compile the kernels of decoder layers in several processes in parallel, because numba serializes within one.

All processes compile the same kernels in different orders. If another process is already compiling a kernel,
a process waits and then loads it from disk (`Kernel.compile`). The same applies to processes that start
together.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, cast

import numba
import torch
from numba.core import registry

from pagemill.kernels.cpu import operators
from pagemill.kernels.cpu.layer import stack
from pagemill.kernels.cpu.matmul.kinds import KindName

logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """One of the kernels of a layer."""

    name: str
    """One of `stack.PARTS`."""
    kind: KindName
    """The kind of the matmuls."""
    cache_dtype: torch.dtype

    def compile(self) -> None:
        """Compile it, or load it from disk."""
        stack.compile_part(self.name, kind=self.kind, cache_dtype=self.cache_dtype)

    def word(self) -> str:
        """Encode it for another process."""
        return f"{self.name}:{self.kind}:{str(self.cache_dtype).removeprefix('torch.')}"

    @classmethod
    def from_word(cls, word: str) -> Part:
        name, kind, dtype = word.split(":")
        return cls(name, cast(KindName, kind), getattr(torch, dtype))


_early: ContextVar[subprocess.Popen[bytes] | None] = ContextVar("early", default=None)


@contextmanager
def compiling_early() -> Iterator[None]:
    """With an empty cache, compile the common kernels in another process during the block, then `compile_apart`'s."""
    directory = Path(numba.config.CACHE_DIR)
    if any(directory.glob("compiled-*")) or not _can_help(directory):
        yield
        return
    other = next(_start_others(1), None)
    token = _early.set(other)
    try:
        yield
    finally:
        _early.reset(token)
        if other is not None:
            _end(other)


def compile_apart(parts: Sequence[Part], meanwhile: Callable[[], None]) -> None:
    """Compile parts in this process, which runs `meanwhile` first, and in others. Returns when all are compiled.

    Other processes only save time. If the disk is not writable, or one of them fails, this process compiles
    everything.
    """
    marker = Path(numba.config.CACHE_DIR) / f"compiled-{_fingerprint(parts)}"
    others: list[subprocess.Popen[bytes]] = []
    try:
        if not marker.exists() and _can_help(marker.parent):
            early = _early.get()
            others += [] if early is None else [early]
            others += _start_others(min(_num_cores(), len(parts)) - 1 - len(others))
        for first, other in enumerate(others):
            _send([*parts[first:], *parts[:first]], other)
        meanwhile()
        for part in reversed(parts):  # the others start at the front
            part.compile()
        with suppress(OSError):
            marker.touch()
    finally:
        for other in others:
            _end(other)


def _can_help(directory: Path) -> bool:
    """Return True if another process can run, and can store its compiled code for this one."""
    return _num_cores() > 1 and _can_keep(directory) and _can_start_python()


def _start_others(count: int) -> Iterator[subprocess.Popen[bytes]]:
    for _ in range(count):
        try:
            yield _start()
        except OSError as error:
            logger.warning("no other process compiles kernels: %s", error)
            return


def _start() -> subprocess.Popen[bytes]:
    """Start a process that compiles the kernels of every model, and then requested ones."""
    paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,  # open for the lifetime of this process
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _send(parts: Sequence[Part], other: subprocess.Popen[bytes]) -> None:
    assert other.stdin is not None
    with suppress(OSError):  # it has exited
        other.stdin.write("".join(f"{part.word()}\n" for part in parts).encode())
        other.stdin.flush()


def _end(other: subprocess.Popen[bytes]) -> None:
    """Stop a process that has no more work."""
    if (status := other.poll()) not in (None, 0, -signal.SIGKILL):
        command = shlex.join(map(str, cast(list[str], other.args)))
        logger.warning(
            "the process that compiles kernels failed (exit status %s); they were compiled in this process: %s",
            status,
            command,
        )
    with suppress(OSError), other:
        other.kill()


def _can_keep(directory: Path) -> bool:
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    return os.access(directory, os.W_OK)


def _can_start_python() -> bool:
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _fingerprint(parts: Sequence[Part]) -> str:
    """Digest of everything that numba's cache depends on (CPU, versions, location), and of the parts."""
    target = registry.cpu_target.target_context.codegen().magic_tuple()
    facts = (sys.version, numba.__version__, target, __file__, *(part.word() for part in parts))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _read_words(words: queue.SimpleQueue[str]) -> None:
    """Forward the parent's requests, and exit together with it."""
    left = ""
    while text := os.read(0, 1 << 16):  # not through `sys.stdin`, which an exiting interpreter tries to lock
        *lines, left = (left + text.decode()).split("\n")
        for line in lines:
            words.put(line)
    os._exit(1)


def _compile_what_is_asked_for() -> None:
    gc.disable()  # saves a tenth of the time; the process is short-lived
    words: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_words, args=(words,), daemon=True).start()
    operators.warm_up()
    while True:
        Part.from_word(words.get()).compile()


if __name__ == "__main__":
    _compile_what_is_asked_for()
