"""A background thread of the worker, which polls for work until it is stopped."""

from __future__ import annotations

import threading


class BackgroundThread:
    """Subclasses implement `_run`, which returns soon after `_stop` is set."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Start no more work, and wait up to `timeout` seconds for work in progress."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        raise NotImplementedError
