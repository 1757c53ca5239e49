"""One process at a time, by a lock on a file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_POLL_S = 0.05


@contextmanager
def hold(path: Path, timeout_s: float) -> Iterator[bool]:
    """Inside: this process alone holds the lock, or False: no such file can be locked, or another holds it so long."""
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except (ImportError, OSError):
        yield False
        return
    with file:
        is_held, give_up_at = False, time.monotonic() + timeout_s
        while not is_held:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    break
                time.sleep(_POLL_S)
            except OSError:  # a file system without locks
                break
        try:
            yield is_held
        finally:
            with suppress(OSError):  # closing is not enough if a process was forked meanwhile
                fcntl.flock(file, fcntl.LOCK_UN)
