"""An exception that a signal handler raises during a call, as Celery's soft time limit does, reaches the caller."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from pagemill import Producer
from pagemill.producer.client.handles import JobHandle
from pagemill.producer.wire.process.interruption import interruption as told
from pagemill.producer.wire.store.store import Store
from tests.conftest import RedisServer

INTERRUPTED_S = 0.1


class SoftLimit(Exception):
    pass


class HandlerFailed(ValueError):
    pass


@contextmanager
def frozen(server: RedisServer) -> Iterator[None]:
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


@contextmanager
def interruption(error: Exception) -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, INTERRUPTED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


ERRORS = [
    SoftLimit("time is up"), HandlerFailed("x"), ValueError("x"), TimeoutError("x"), ConnectionError("x"),
]  # fmt: skip
"""The driver also raises the last two, and retries after them."""
CALLS: dict[str, Callable[[Producer, JobHandle], Any]] = {
    "submit": lambda producer, _: producer.submit(prompt="x", model="m"),
    "submit_many": lambda producer, _: producer.submit_many([{"prompt": "x", "model": "m"}] * 600),
    "status": lambda _, handle: handle.status(),
    "result": lambda _, handle: handle.result(timeout=60),
    "stream": lambda _, handle: list(handle.stream()),
    "cancel": lambda _, handle: handle.cancel(),
}


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals arrive in the main thread"
)
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_exception_of_a_signal_handler_reaches_the_caller(
    own_valkey: RedisServer, error: Exception
) -> None:
    with Producer(own_valkey.url, queue="q") as producer:
        handle = producer.submit(prompt="x", model="m")
        for name, call in CALLS.items():
            with frozen(own_valkey), interruption(error):
                with pytest.raises(type(error)) as raised:
                    call(producer, handle)
                assert raised.value is error, name
            state = "cancelled" if name == "cancel" else "queued"
            assert handle.status().state in ("queued", state), f"the producer works after {name}"
        jobs = producer.submit_many({"prompt": str(i), "model": "m"} for i in range(3))
        assert jobs.counts().queued == 3


def test_so_does_one_that_is_raised_while_a_store_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"file://{tmp_path}")
    monkeypatch.setattr(LocalFileSystem, "rm_file", lambda *_: time.sleep(60))
    error = SoftLimit("time is up")
    with interruption(error), pytest.raises(SoftLimit) as raised:
        store.delete(f"{store.url}/file")
    assert raised.value is error


def test_only_a_handler_interrupts() -> None:
    with pytest.raises(TimeoutError) as raised:
        raise TimeoutError
    assert told(raised.value) is None
