"""Compiles the kernels of decoder layers in several processes at once: within one, numba compiles one at a time.

All take the same kernels in different orders. What one process is compiling another waits for, and then loads it from
the disk (`Kernel.compile`); so do processes that start together.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

import numba
import torch
from numba.core import registry

from pagemill.kernels.cpu.layer import layer as cpu_layer
from pagemill.kernels.cpu.matmul.kinds import KindName

logger = logging.getLogger(__name__)


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

    def word(self) -> str:
        """Tell another process of it."""
        return f"{self.name}:{self.kind}:{str(self.cache_dtype).removeprefix('torch.')}"

    @classmethod
    def of(cls, word: str) -> Part:
        name, kind, dtype = word.split(":")
        return cls(name, cast(KindName, kind), getattr(torch, dtype))


def compile_apart(parts: Sequence[Part], meanwhile: Callable[[], None]) -> None:
    """Compile parts in this process, which runs `meanwhile` first, and in others; at once if they are compiled.

    Others only save time: where nothing can be kept on the disk, or one fails, all is compiled here.
    """
    marker = Path(numba.config.CACHE_DIR) / f"compiled-{_fingerprint(parts)}"
    others: list[subprocess.Popen[bytes]] = []
    try:
        if not marker.exists() and _can_keep(marker.parent) and _can_start_python():
            others += _start_others(parts, min(_num_cores(), len(parts)) - 1)
        meanwhile()
        for part in reversed(parts):  # the others begin at the front
            part.compile()
        with suppress(OSError):
            marker.touch()
    finally:
        for other in others:
            _end(other)


def _start_others(parts: Sequence[Part], count: int) -> Iterator[subprocess.Popen[bytes]]:
    for first in range(count):
        try:
            yield _start([*parts[first:], *parts[:first]])
        except OSError as error:
            logger.warning("no other process compiles kernels: %s", error)
            return


def _end(other: subprocess.Popen[bytes]) -> None:
    """End a process, which has nothing left to do."""
    if (status := other.poll()) not in (None, 0):
        command = shlex.join(map(str, cast(list[str], other.args)))
        logger.warning(
            "compiling kernels apart failed (exit status %s), so all was here: %s", status, command
        )
    with other:
        other.kill()


def _start(parts: Sequence[Part]) -> subprocess.Popen[bytes]:
    """Start a process that compiles parts in this order."""
    paths = [path or os.getcwd() for path in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, *(part.word() for part in parts)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE,  # open as long as this process lives
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _can_keep(directory: Path) -> bool:
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    return os.access(directory, os.W_OK)


def _can_start_python() -> bool:
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _fingerprint(parts: Sequence[Part]) -> str:
    """Of what numba takes machine code for the same by: CPU, versions, and place; and of which parts it is about."""
    target = registry.cpu_target.target_context.codegen().magic_tuple()
    facts = (sys.version, numba.__version__, target, __file__, *(part.word() for part in parts))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_with_parent() -> None:
    os.read(0, 1)  # not by `sys.stdin`, which an ending interpreter wants to lock
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.disable()  # a tenth of the time, for a process that soon ends
    for word in sys.argv[1:]:
        Part.of(word).compile()
