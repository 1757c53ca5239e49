"""The pool of `pagemill celery-worker`: Celery's threads, which a signal can stop at any time."""

from __future__ import annotations

from typing import NoReturn

from celery.concurrency import ALIASES, thread
from celery.utils import log as celery_log


class TaskPool(thread.TaskPool):  # type: ignore[misc]  # Celery has no types
    """Celery's pool of threads.

    On SIGQUIT, Celery stops its pool within the signal handler and waits for all tasks there. The main thread may have
    been interrupted while it held a lock that this needs, such as that of the executor or of a logger, which would be a
    deadlock. Here the handler returns, and the worker waits for the tasks when it terminates.
    """

    def on_stop(self) -> None:
        """Wait for the running tasks, but never in a signal handler."""
        if not celery_log._in_sighandler:
            super().on_stop()

    def on_terminate(self) -> None:
        """Wait for the running tasks: Celery calls this from its loop after SIGQUIT."""
        self.executor.shutdown(cancel_futures=True)

    def grow(self, n: int) -> NoReturn:
        """Reject `pool_grow` of Celery's remote control. Raises NotImplementedError, which is its reply."""
        raise NotImplementedError(
            "pool_grow is not supported: start celery-worker with another --concurrency"
        )

    def shrink(self, n: int) -> NoReturn:
        """Reject `pool_shrink` of Celery's remote control. Raises NotImplementedError, which is its reply."""
        raise NotImplementedError(
            "pool_shrink is not supported: start celery-worker with another --concurrency"
        )


def use_task_pool() -> None:
    """Use this pool for Celery's `-P threads` in this process."""
    ALIASES["threads"] = f"{TaskPool.__module__}:{TaskPool.__name__}"
