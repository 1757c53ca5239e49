"""A lock on a file: one process at a time, for the requested duration, and harmless without lock support."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

from pagemill.kernels.cpu.jit import file_lock

HOLDER = """
import sys, time
from pathlib import Path
from pagemill.kernels.cpu.jit import file_lock
with file_lock.hold(Path(sys.argv[1]), 0.0) as is_held:
    print(is_held, flush=True)
    sys.stdin.read()
"""


def test_one_process_at_a_time(tmp_path):
    path = tmp_path / "new" / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with file_lock.hold(path, 0.1) as is_held:
            assert not is_held
        holder.kill()
    with file_lock.hold(path, 10.0) as is_held:
        assert is_held


def test_a_process_that_was_forked_meanwhile_holds_nothing(tmp_path):
    path = tmp_path / "lock"
    with file_lock.hold(path, 0.0) as is_held:
        assert is_held
        # Like a forked process: the same open file.
        copy = os.dup(next(fd for fd in map(int, os.listdir("/proc/self/fd")) if _leads_to(fd, path)))
    with file_lock.hold(path, 0.0) as is_held:
        assert is_held, "although the file is still open"
    os.close(copy)


def _leads_to(fd: int, path: os.PathLike[str]) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == str(path)
    except OSError:
        return False


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS])
def test_where_nothing_can_be_locked_nobody_waits(tmp_path, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with file_lock.hold(tmp_path / "lock", 60.0) as is_held:
        assert not is_held
    (tmp_path / "file").touch()
    with file_lock.hold(tmp_path / "file" / "lock", 60.0) as is_held:
        assert not is_held
