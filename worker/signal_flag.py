"""A flag that a signal handler may set while its own thread waits for it."""

from __future__ import annotations

import contextlib
import queue


class SignalFlag:
    """`threading.Event` for one thread that waits and the handlers that run on it.

    An Event is set under a lock that `wait` takes too: a handler that interrupts the thread there would
    deadlock. A SimpleQueue's `put` is reentrant.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._is_set = True
        self._bell.put(None)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, up to `timeout` seconds. Returns whether it is."""
        if not self._is_set:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=timeout)
        return self._is_set
