"""Commands to a running supervisor: one JSON line to its Unix socket, JSON lines as reply.

`{"command": "status"}` gets one document, `stop` gets `{"event": text}`. Any other line gets an event and
`{"ok": false}`.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pagemill.supervisor.run_directory import SOCKET_FILE

logger = logging.getLogger(__name__)

MAX_COMMAND_BYTES = 4096
TIMEOUT_S = 10.0


class NotRunning(Exception):
    """No supervisor uses this run directory, or this user cannot access it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Functions called by the commands, on the server's threads."""

    status: Callable[[], Mapping[str, Any]]
    stop: Callable[[bool], None]
    """True: hurry."""


class ControlServer:
    """Serves commands on separate threads until closed."""

    def __init__(self, path: Path, commands: Commands) -> None:
        path.unlink(missing_ok=True)  # of a killed supervisor: this process has the directory's lock
        before = os.umask(0o177)
        try:
            self._server = _Server(str(path), type("Handler", (_Handler,), {"commands": commands}))
        finally:
            os.umask(before)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="pagemill-control", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a client of the control socket went away", exc_info=True)


class _Handler(socketserver.StreamRequestHandler):
    commands: Commands
    timeout = TIMEOUT_S

    def handle(self) -> None:
        try:
            order = json.loads(self.rfile.readline(MAX_COMMAND_BYTES))
            command = order["command"]
        except (ValueError, KeyError, TypeError):
            self._reply(ok=False, event='no command: a line such as {"command": "status"}')
            return
        match command:
            case "status":
                self._reply(**self.commands.status())
            case "stop":
                self.commands.stop(bool(order.get("now")))
                self._reply(event="stopping")
            case _:
                self._reply(ok=False, event=f"there is no command {str(command)[:50]!r}")

    def _reply(self, **document: Any) -> None:
        self.wfile.write(json.dumps(document).encode() + b"\n")


def send_command(directory: Path, **command: Any) -> Iterator[dict[str, Any]]:
    """Send a command and yield the replies until the supervisor disconnects. Raises NotRunning."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(str(directory / SOCKET_FILE))
            client.sendall(json.dumps(command).encode() + b"\n")
        except OSError as error:
            raise _not_running(directory, error) from None
        with client.makefile("rb") as replies:
            while line := _read(replies, directory):
                yield json.loads(line)


def _read(replies: BinaryIO, directory: Path) -> bytes:
    try:
        return replies.readline()
    except ConnectionResetError as error:  # it exited before it accepted the connection
        raise _not_running(directory, error) from None


def _not_running(directory: Path, error: OSError) -> NotRunning:
    if isinstance(error, PermissionError):
        return NotRunning(f"{directory}: permission denied; run the command as the user of pagemill up")
    reason = error.strerror or error
    return NotRunning(
        f"no pagemill up runs with {directory} ({reason}); start one: pagemill up --model smollm2"
    )
