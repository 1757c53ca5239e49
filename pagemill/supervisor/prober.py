"""Queries a child's probes on a thread, so that an unresponsive child does not delay others."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

TIMEOUT_S = 5.0
BUSY_S = 0.25
"""Interval while an action such as a restart depends on the result."""
IDLE_S = 2.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Health:
    """The last probe results. `pid` is the probed process; results of an earlier process are invalid."""

    pid: int
    asked_at: float
    """Monotonic time, before the first probe."""
    is_ready: bool
    unhealthy_since: float | None
    """Start of failures of /healthz; None: it is healthy, or never was."""


class Prober:
    """Keeps `health` of one child up to date, from `watch` to `close`."""

    def __init__(self, url: str, name: str, *, ready_path: str = "/readyz") -> None:
        self.url = url
        self._ready_path = ready_path
        self.health: Health | None = None
        self.is_urgent = True
        self._pid: int | None = None
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"pagemill-probe-{name}", daemon=True)
        self._thread.start()

    def watch(self, pid: int | None) -> None:
        """Probe this process from now on; None: there is none."""
        self._pid = pid
        self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    def _run(self) -> None:
        was_well = False
        last_pid: int | None = None
        unhealthy_since: float | None = None
        while not self._is_closed:
            self._wake.wait(BUSY_S if self.is_urgent else IDLE_S)
            self._wake.clear()
            pid = self._pid
            if pid is None:
                continue
            if pid != last_pid:
                last_pid, was_well, unhealthy_since = pid, False, None
            asked_at = time.monotonic()
            is_well = answers(f"{self.url}/healthz")
            was_well = was_well or is_well
            if is_well:
                unhealthy_since = None
            elif was_well and unhealthy_since is None:
                unhealthy_since = asked_at
            is_ready = is_well and answers(f"{self.url}{self._ready_path}")
            self.health = Health(pid, asked_at, is_ready, unhealthy_since)


def answers(url: str) -> bool:
    """Return whether a probe returns 200."""
    try:
        with _opener.open(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except (OSError, ValueError):
        return False
