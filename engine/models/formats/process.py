"""Runs a conversion in a separate process with limits on its memory, CPU time and output: the files are untrusted."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

import psutil

from pagemill.common import report_interval
from pagemill.engine.child_process import ending, environment
from pagemill.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

_CHILD = "pagemill.engine.models.formats.child"
_START_CPU_S = 60.0
"""CPU time to import torch and transformers on a slow machine, and to read the files' structure."""
_BYTES_PER_CPU_SECOND = 10 * 2**20
"""The slowest CPU on which a conversion still completes."""
_IDLE_S = 600.0
"""A process without CPU time and output for this long is waiting for a disk that does not respond."""
_OUTPUT_PER_BYTE = 24
"""Limit of fp32 output per input byte: the smallest type of GGUF has 1.56 bits per weight."""
_SPARE_OUTPUT_BYTES = 2**28
"""Additional output: the tokenizer's files and the headers of safetensors."""
_LOOK_S = 0.05
_MOST_SAID = 2**16


def convert(kind: Literal["pickle", "gguf"], sources: Sequence[Path], directory: Path) -> None:
    """Convert files into an empty directory; logs progress every two seconds on a terminal, or every 30 in a log.

    Raises:
        ModelLoadError: the files are unreadable, or have other contents.
    """
    source = sources[0].name if len(sources) == 1 else f"{len(sources)} files of {sources[0].parent}"
    logger.info("converting %s, once", source)
    with tempfile.TemporaryFile() as said:
        child = _spawn([kind, str(directory), *map(str, sources)], said)
        try:
            _follow(child, source, sum(file.stat().st_size for file in sources), directory)
        finally:
            child.kill()
            child.wait()
            if child.stdin is not None:
                child.stdin.close()
        if child.returncode != 0:
            raise _failure(child.returncode, said, sources[0].parent)


def _spawn(words: list[str], said: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", _CHILD, *words],
        env=environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,  # it exits when this closes: with this process
        stdout=said,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _follow(child: subprocess.Popen[bytes], source: str, num_bytes: int, directory: Path) -> None:
    """Wait for the process to exit.

    Raises:
        ModelLoadError: it exceeded its CPU time or output, or made no progress. Wall-clock time is not limited,
            since a busy machine may give the process little CPU time.
    """
    started_at = progress_at = time.monotonic()
    report_at = started_at + report_interval.FIRST_S
    cpu_limit_s = _START_CPU_S + num_bytes / _BYTES_PER_CPU_SECOND
    output_limit = _SPARE_OUTPUT_BYTES + _OUTPUT_PER_BYTE * num_bytes
    progress = (0.0, 0)
    while child.poll() is None:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        cpu_s, written = _cpu_seconds(child.pid), _written(directory)
        if (cpu_s, written) != progress:
            progress, progress_at = (cpu_s, written), now
        if cpu_s > cpu_limit_s:
            raise _unsafe(source, f"took more than {cpu_limit_s:.0f} s of CPU time")
        if written > output_limit:
            raise _unsafe(source, f"wrote more than {output_limit / 2**20:.0f} MiB")
        if now - progress_at > _IDLE_S:
            raise ModelLoadError(
                f"reading {source} made no progress for {_IDLE_S:.0f} s; check whether its disk responds"
            )
        if now >= report_at:
            report_at = now + report_interval.seconds()
            _log_progress(source, now - started_at, cpu_s, written)


def _unsafe(source: str, problem: str) -> ModelLoadError:
    return ModelLoadError(f"reading {source} {problem}; it may be damaged or hostile")


def _log_progress(source: str, elapsed_s: float, cpu_s: float, written: int) -> None:
    slow = (
        f"; the machine is slow or busy, {cpu_s:.0f} s of CPU time used" if elapsed_s > 2 * cpu_s + 10 else ""
    )
    logger.info("converting %s: %.0f s, %.0f MiB%s", source, elapsed_s, written / 2**20, slow)


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used; 0 if it has exited."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _written(directory: Path) -> int:
    total = 0
    for file in directory.iterdir():
        with suppress(FileNotFoundError):  # renamed meanwhile
            total += file.stat().st_size
    return total


def _failure(code: int, said: IO[bytes], directory: Path) -> Exception:
    """Return the error for a failed child, from its last line or its exit status."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - _MOST_SAID))
    for line in reversed(said.read().decode(errors="replace").splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            answer = json.loads(line)
            if answer["errno"]:
                return OSError(answer["errno"], os.strerror(answer["errno"]))
            return ModelLoadError(f"can't load the weights in {directory}: {answer['error']}")
    return ModelLoadError(
        f"can't load the weights in {directory}: their reader {ending(code)}; a file may be damaged or hostile"
    )
