"""Whether the worker pulls jobs, as set by an operator: `pagemill workers drain | pause | resume`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

PullState = Literal["paused", "draining", "drained", "quarantined"]


class PullControl:
    """Stores the latest command. Methods are called by several threads."""

    def __init__(
        self,
        grace_s: float,
        *,
        num_jobs: Callable[[], int],
        hand_back: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        """`hand_back` requeues all running jobs, `changed` wakes the thread that pulls.

        Args:
            grace_s: seconds that running jobs may continue after the start of a drain.
        """
        self._grace_s = grace_s
        self._num_jobs = num_jobs
        self._hand_back = hand_back
        self._changed = changed
        self._lock = threading.Lock()
        self._decision: Literal["pause", "drain"] | None = None
        self._timer: threading.Timer | None = None

    @property
    def state(self) -> PullState | None:
        """The operator's command; None: the worker pulls."""
        match self._decision:
            case "pause":
                return "paused"
            case "drain":
                return "draining" if self._num_jobs() else "drained"
        return None

    def decide(self, action: Literal["drain", "pause", "resume"]) -> None:
        """Execute a command. A repeated drain keeps its first grace period."""
        with self._lock:
            if action == "drain" and self._decision == "drain":
                return
            self._stop_timer()
            self._decision = None if action == "resume" else action
            if action == "drain":
                self._timer = threading.Timer(self._grace_s, self._end_grace)
                self._timer.daemon = True
                self._timer.start()
        self._changed()

    def close(self) -> None:
        """Requeue no more jobs."""
        with self._lock:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_grace(self) -> None:
        with self._lock:
            if self._decision == "drain":
                self._hand_back()
