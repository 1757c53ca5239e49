"""Celery's thread pool is stopped by signals that interrupt the main thread anywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from celery.concurrency import get_implementation
from celery.utils.log import in_sighandler

from pagemill.producer.celery.pool import TaskPool, use_task_pool

PATIENCE_S = 30.0


def ends(call: Callable[[], None]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def test_a_signal_handler_waits_for_no_task() -> None:
    """It interrupts a submit, which holds the executor's lock, while a task runs."""
    pool = TaskPool(limit=1)
    pool.start()
    running, may_end = threading.Event(), threading.Event()

    def task() -> None:
        running.set()
        may_end.wait(PATIENCE_S)

    pool.executor.submit(task)
    assert running.wait(PATIENCE_S)

    def handle() -> None:
        with in_sighandler():
            pool.stop()

    with pool.executor._shutdown_lock:
        assert ends(handle)
    assert not pool.executor._shutdown, "it is stopped later"
    may_end.set()
    assert ends(pool.terminate)
    assert pool.executor._shutdown


def test_a_warm_shutdown_waits_for_tasks() -> None:
    pool = TaskPool(limit=1)
    pool.start()
    assert ends(pool.stop)
    assert pool.executor._shutdown


def test_remote_control_says_what_is_not_supported() -> None:
    pool = TaskPool(limit=1)
    for change in (pool.grow, pool.shrink):
        with pytest.raises(NotImplementedError, match="another --concurrency"):
            change(1)
    pool.stop()


def test_it_is_the_pool_of_the_worker() -> None:
    use_task_pool()
    assert get_implementation("threads") is TaskPool
