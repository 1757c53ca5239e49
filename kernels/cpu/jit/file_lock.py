"""One process at a time, by a lock on a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def hold(path: Path, timeout_s: float) -> Iterator[bool]:
    """Inside: this process alone holds the lock, or False: no such file can be locked, or another holds it so long."""
    lock = FileLock(path, timeout_s, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError:  # filelock.Timeout is one too
        pass
    try:
        yield lock.is_locked
    finally:
        lock.release()
