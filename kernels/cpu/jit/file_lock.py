"""A lock on a file, held by one process at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def hold(path: Path, timeout_s: float) -> Iterator[bool]:
    """Yield True while this process holds the lock; False if the file cannot be locked or another process holds it."""
    lock = FileLock(path, timeout_s, fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError:  # includes filelock.Timeout
        pass
    try:
        yield lock.is_locked
    finally:
        lock.release()
