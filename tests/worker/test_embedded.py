"""The embedded server is a real process: the tests start it, kill it and inspect the remaining state."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from pagemill.worker import embedded
from pagemill.worker.embedded import EmbeddedServer, EmbeddedServerError
from tests.worker.harness import eventually

OWNER_SCRIPT = """
import sys, time
from pathlib import Path
from pagemill.worker.embedded import EmbeddedServer
server = EmbeddedServer.open(Path(sys.argv[1]))
print(server.url, server.record.pid, server.is_owner, flush=True)
time.sleep(60)
"""


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "state"
    yield directory
    if (record := embedded._running(directory)) is not None:
        embedded._terminate(record.pid)


def spawn_owner(state_dir: Path) -> tuple[subprocess.Popen[str], str, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER_SCRIPT, str(state_dir)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url, pid, is_owner = process.stdout.readline().split()
    process.stdout.close()
    assert is_owner == "True"
    return process, url, int(pid)


def wait_until_gone(pid: int) -> None:
    give_up = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up, f"process {pid} is still there"
        time.sleep(0.02)


def test_the_server_persists_every_write_and_never_evicts(state_dir: Path) -> None:
    with EmbeddedServer.open(state_dir) as server, redis.Redis.from_url(server.url) as client:
        settings = {
            name: client.config_get(name)[name]
            for name in ("appendonly", "appendfsync", "maxmemory-policy", "save")
        }
        assert settings == {
            "appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": "",
        }  # fmt: skip
        assert stat.S_IMODE(state_dir.stat().st_mode) == 0o700
        assert server.record.unix_socket is not None
        with redis.Redis(unix_socket_path=server.record.unix_socket) as by_socket:
            assert by_socket.ping()


def test_data_and_url_outlive_the_server(state_dir: Path) -> None:
    with EmbeddedServer.open(state_dir) as server, redis.Redis.from_url(server.url) as client:
        url = server.url
        client.set("key", "value")
    assert not (state_dir / "server.json").exists()
    with EmbeddedServer.open(state_dir) as server, redis.Redis.from_url(server.url) as client:
        assert server.url == url
        assert client.get("key") == b"value"


def test_a_second_process_attaches_and_leaves_the_server_running(state_dir: Path) -> None:
    with EmbeddedServer.open(state_dir) as owner:
        with EmbeddedServer.open(state_dir) as second:
            assert (second.url, second.is_owner) == (owner.url, False)
        with redis.Redis.from_url(owner.url) as client:
            assert client.ping()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_the_server_ends_when_its_owner_is_killed(state_dir: Path) -> None:
    process, _, pid = spawn_owner(state_dir)
    process.kill()
    process.wait()
    wait_until_gone(pid)


@pytest.mark.slow
def test_a_killed_owner_is_replaced_at_once_and_nothing_is_lost(state_dir: Path) -> None:
    process, url, _ = spawn_owner(state_dir)
    with redis.Redis.from_url(url) as client:
        client.set("key", "value")
    process.kill()
    process.wait()
    # The old server may still reply for a moment: the new owner must not rely on it.
    with EmbeddedServer.open(state_dir) as server, redis.Redis.from_url(server.url) as client:
        assert server.is_owner
        time.sleep(0.5)
        assert client.get("key") == b"value"


def test_one_that_attached_takes_over_when_the_owner_is_killed(state_dir: Path) -> None:
    process, url, pid = spawn_owner(state_dir)
    with EmbeddedServer.open(state_dir) as attached:
        assert not attached.is_owner
        with redis.Redis.from_url(url) as client:
            client.set("key", "value")
        process.kill()
        process.wait()
        eventually(attached.revive, "the end of the server to be noticed")
        assert (attached.is_owner, attached.url) == (True, url)
        with redis.Redis.from_url(url) as client:
            assert client.get("key") == b"value"
    assert pid != attached.record.pid


def test_ctrl_c_does_not_reach_the_server(state_dir: Path) -> None:
    process, _, pid = spawn_owner(state_dir)
    assert os.getsid(pid) != os.getsid(process.pid)
    process.kill()
    process.wait()
    wait_until_gone(pid)


@pytest.mark.slow
def test_an_orphan_is_adopted_and_ended_by_its_new_owner(state_dir: Path) -> None:
    orphan = EmbeddedServer.open(state_dir)
    # The kernel releases a lock with the process that held it; the server here outlives its owner as on macOS.
    assert orphan._owner_lock is not None
    orphan._owner_lock.release()
    with EmbeddedServer.open(state_dir) as adopter:
        assert adopter.is_owner
        assert adopter.record.pid == orphan.record.pid
    wait_until_gone(orphan.record.pid)


def test_a_killed_server_is_revived_with_its_data(state_dir: Path) -> None:
    with EmbeddedServer.open(state_dir) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
        url, pid = server.url, server.record.pid
        assert not server.revive()
        os.kill(pid, signal.SIGKILL)
        eventually(server.revive, "the server's end to be noticed")
        assert server.url == url
        with redis.Redis.from_url(server.url) as client:
            assert client.get("key") == b"value"


def test_stale_files_of_a_machine_that_went_down_are_no_obstacle(state_dir: Path) -> None:
    state_dir.mkdir()
    (state_dir / "server.json").write_text('{"url": "redis://127.0.0.1:1/0", "unix_socket": null, "pid": 1, '
                                           '"started_at": 0}')  # fmt: skip
    (state_dir / "port").write_text("not a port")
    with EmbeddedServer.open(state_dir) as server:
        assert server.is_owner


def test_a_state_directory_too_deep_for_a_socket_still_serves(tmp_path: Path) -> None:
    with EmbeddedServer.open(tmp_path / ("d" * 120)) as server:
        assert server.record.unix_socket is None
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def test_unreadable_data_is_reported_with_the_servers_own_words(state_dir: Path) -> None:
    (state_dir / "valkey" / "appendonlydir").mkdir(parents=True)
    (state_dir / "valkey" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(EmbeddedServerError, match="manifest"):
        EmbeddedServer.open(state_dir)
    with pytest.raises(EmbeddedServerError, match="manifest"):  # not "another process owns it"
        EmbeddedServer.open(state_dir)
