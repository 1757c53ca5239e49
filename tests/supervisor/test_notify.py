"""systemd's notifications, on a real socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagemill.supervisor.notify import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def listening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@pagemill-{os.getpid()}-{id(tmp_path)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("\0" + name[1:] if name.startswith("@") else name)
        listener.settimeout(10)
        yield listener, name


def test_it_tells_what_it_is_given(listening: tuple[socket.socket, str]) -> None:
    listener, name = listening
    manager = ServiceManager({"NOTIFY_SOCKET": name})
    manager.notify(READY=1, STATUS="all there")
    assert listener.recv(4096) == b"READY=1\nSTATUS=all there"


def test_a_status_is_told_once(listening: tuple[socket.socket, str]) -> None:
    listener, name = listening
    manager = ServiceManager({"NOTIFY_SOCKET": name})
    for status in ("a", "a", "b"):
        manager.notify_status(status)
    assert [listener.recv(4096) for _ in range(2)] == [b"STATUS=a", b"STATUS=b"]


def test_signs_of_life_come_twice_as_often_as_asked(listening: tuple[socket.socket, str]) -> None:
    listener, name = listening
    manager = ServiceManager(
        {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}
    )
    assert manager.watchdog_s == 2.0
    for now in (0.0, 0.5, 0.9, 1.0, 1.5, 2.1):
        manager.beat(now)
    manager.notify(DONE=1)
    assert [listener.recv(4096) for _ in range(4)] == [b"WATCHDOG=1"] * 3 + [b"DONE=1"]


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "0"}],
)
def test_no_watchdog_is_fed_that_is_not_ours(environment: dict[str, str]) -> None:
    assert ServiceManager({"NOTIFY_SOCKET": "/nowhere"} | environment).watchdog_s is None


def test_nobody_listens() -> None:
    ServiceManager({}).notify(READY=1)
    ServiceManager({"NOTIFY_SOCKET": "/no/such/socket"}).notify(READY=1)
