"""The directory of a running supervisor: its lock, its processes, and its command socket.

Only its owner has access: a process with access to the socket can stop all processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pagemill.supervisor.child import identity

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
STATE_FILE = "state.json"
SOCKET_FILE = "control.sock"
MAX_SOCKET_PATH = 100
"""In bytes (Linux: 108, macOS: 104)."""


class RunDirectoryError(RuntimeError):
    """The directory cannot be used; the message has the reason and the remedy."""


class RunDirectory:
    """Locks the directory until closed, for one supervisor each."""

    def __init__(self, path: Path) -> None:
        """Raises RunDirectoryError if another supervisor uses it, or if it is not writable."""
        self.path = path
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH:
            raise RunDirectoryError(
                f"{path} is too long for a Unix socket's path (at most {MAX_SOCKET_PATH} bytes with its name): "
                "name a shorter --run-dir"
            )
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.chmod(0o700)
            self._lock = FileLock(path / LOCK_FILE, thread_local=False, fallback_to_soft=False)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise RunDirectoryError(
                f"another pagemill up runs with {path}: pagemill up status shows it; for a second one on this "
                "machine name another --run-dir"
            ) from None
        except OSError as error:
            raise RunDirectoryError(
                f"{path} can't be used: {error.strerror or error}; name another --run-dir"
            ) from error

    @property
    def socket_path(self) -> Path:
        return self.path / SOCKET_FILE

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Write by rename, so that readers see a complete file. A full disk is logged and not an error."""
        temporary = self.path / f"{STATE_FILE}.new"
        try:
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(state, indent=1) + "\n")
            temporary.replace(self.path / STATE_FILE)
        except OSError as error:
            logger.warning("%s can't be written: %s", self.path / STATE_FILE, error.strerror or error)

    def end_leftovers(self, patience_s: float) -> None:
        """Stop the processes of a killed supervisor, which occupy ports and devices.

        The kernel has signaled those processes to drain; any still running after `patience_s` are killed.
        """
        left = [process for process in _processes(self.path / STATE_FILE) if _lives(*process)]
        if left:
            logger.warning("%d processes of a supervisor that was killed are still draining", len(left))
        for process in left:
            _signal(process, signal.SIGTERM)
        give_up = time.monotonic() + patience_s
        while any(_lives(*process) for process in left) and time.monotonic() < give_up:
            time.sleep(0.1)
        for process in left:
            if _lives(*process):
                logger.error(
                    "process %d of a supervisor that was killed does not end; killing it", process[0]
                )
                _signal(process, signal.SIGKILL)
        (self.path / STATE_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        (self.path / STATE_FILE).unlink(missing_ok=True)
        self.socket_path.unlink(missing_ok=True)
        self._lock.release()


def _processes(state_file: Path) -> Sequence[tuple[int, float]]:
    try:
        state = json.loads(state_file.read_text())
        return [(int(pid), float(created)) for pid, created in state["processes"] if created is not None]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _lives(pid: int, created: float) -> bool:
    return identity(pid) == created


def _signal(process: tuple[int, float], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(process[0], number)  # children lead their groups
        else:
            os.kill(process[0], number)
