"""A producer's search for the server."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill import Producer, RedisUnavailable
from pagemill.producer.wire.server import discovery
from pagemill.producer.wire.server.discovery import find_redis


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PAGEMILL_REDIS_URL", raising=False)
    monkeypatch.setenv("PAGEMILL_STATE_DIR", str(tmp_path))
    return tmp_path


def write_record(state_dir: Path, **fields: object) -> None:
    record = {"url": "redis://127.0.0.1:7001/0", "pid": os.getpid(), "started_at": 1.0} | fields
    (state_dir / "server.json").write_text(json.dumps(record))


def test_a_given_url_wins_over_the_environment_and_that_over_the_file(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(state_dir)
    assert find_redis() == "redis://127.0.0.1:7001/0"
    monkeypatch.setenv("PAGEMILL_REDIS_URL", "redis://env:1/0")
    assert find_redis() == "redis://env:1/0"
    assert find_redis("redis://given:1/0") == "redis://given:1/0"


def test_the_state_directory_follows_the_xdg_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert discovery.state_dir() == tmp_path
    monkeypatch.delenv("PAGEMILL_STATE_DIR")
    assert discovery.state_dir() == Path("/state/pagemill")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert discovery.state_dir() == Path.home() / ".local/state/pagemill"


def test_a_directory_of_another_user_is_named(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(RedisUnavailable, match=f"^state directory {state_dir}: permission denied; run as"):
        find_redis()


def test_the_unix_socket_is_preferred_while_it_is_there(state_dir: Path) -> None:
    path = state_dir / "a b.sock"
    write_record(state_dir, unix_socket=str(path))
    assert find_redis() == "redis://127.0.0.1:7001/0"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert find_redis() == f"unix://{str(path).replace(' ', '%20')}"


def test_without_a_server_the_error_says_what_to_type() -> None:
    with pytest.raises(RedisUnavailable, match="pagemill worker --model"):
        Producer().submit(prompt="p", model="m")


def test_the_record_of_a_dead_server_counts_for_nothing(state_dir: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_record(state_dir, pid=dead.pid)
    with pytest.raises(RedisUnavailable):
        find_redis()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"url": "redis://h"}', '"text"'])
def test_a_broken_record_counts_for_nothing(state_dir: Path, text: str) -> None:
    (state_dir / "server.json").write_text(text)
    with pytest.raises(RedisUnavailable):
        find_redis()
