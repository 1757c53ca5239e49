"""Runs a conversion in a process of its own, with limits on its memory and time: the files may be anybody's."""

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

from pagemill.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

_CHILD = "pagemill.engine.models.formats.child"
_START_S = 60.0
"""The time to import torch and transformers on a slow and busy machine, and to read the files' structure."""
_BYTES_PER_SECOND = 10 * 2**20
"""The slowest disk and CPU on which a conversion still ends in time."""
_REPORT_S = 2.0
_LOOK_S = 0.05
_MOST_SAID = 2**16


def convert(kind: Literal["pickle", "gguf"], sources: Sequence[Path], directory: Path) -> None:
    """Convert files into an empty directory; reports progress every two seconds.

    Raises:
        ModelLoadError: the files can't be read, or hold something else.
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
    root = str(Path(sys.modules["pagemill"].__path__[0]).parent)
    return subprocess.Popen(
        [sys.executable, "-m", _CHILD, *words],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.PIPE,  # it ends when this closes: with this process
        stdout=said,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _follow(child: subprocess.Popen[bytes], source: str, num_bytes: int, directory: Path) -> None:
    """Wait for the end. Raises `ModelLoadError` if time runs out first."""
    started_at = reported_at = time.monotonic()
    allowed_s = _START_S + num_bytes / _BYTES_PER_SECOND
    while child.poll() is None:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        if now - started_at > allowed_s:
            raise ModelLoadError(
                f"reading {source} took more than {allowed_s:.0f} s; it may be damaged or hostile"
            )
        if now - reported_at >= _REPORT_S:
            reported_at = now
            logger.info(
                "converting %s: %.0f s, %.0f MiB", source, now - started_at, _written(directory) / 2**20
            )


def _written(directory: Path) -> int:
    total = 0
    for file in directory.iterdir():
        with suppress(FileNotFoundError):  # renamed meanwhile
            total += file.stat().st_size
    return total


def _failure(code: int, said: IO[bytes], directory: Path) -> Exception:
    """Return what to raise for a child that failed, by its last line or by how it ended."""
    size = said.seek(0, os.SEEK_END)
    said.seek(max(0, size - _MOST_SAID))
    for line in reversed(said.read().decode(errors="replace").splitlines()):
        with suppress(ValueError, KeyError, TypeError):
            answer = json.loads(line)
            if answer["errno"]:
                return OSError(answer["errno"], os.strerror(answer["errno"]))
            return ModelLoadError(f"can't load the weights in {directory}: {answer['error']}")
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return ModelLoadError(
        f"can't load the weights in {directory}: their reader ended with {how}; a file may be damaged or hostile"
    )
