"""Commands to a supervisor that is about to exit."""

from __future__ import annotations

import errno
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagemill.supervisor.control import NotRunning, send_command
from pagemill.supervisor.run_directory import SOCKET_FILE


def test_one_that_ends_with_a_command_unread_does_not_run(tmp_path: Path) -> None:
    """The kernel resets the connection, like those that are still in its socket's queue."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        listener.bind(str(tmp_path / SOCKET_FILE))
        listener.listen()
        replies = pool.submit(list, send_command(tmp_path, command="status"))
        connection, _ = listener.accept()
        select.select([connection], [], [])
        connection.close()
        with pytest.raises(NotRunning, match="no pagemill up runs"):
            replies.result()


def test_another_users_is_not_reported_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(NotRunning, match=f"^{tmp_path}: permission denied; run the command as the user"):
        list(send_command(tmp_path, command="status"))
