"""A member of the fleet: one worker, gateway or exporter, and its successive processes."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass
from typing import Any, Literal

from pagemill.common.backoff import Backoff
from pagemill.supervisor.child import ChildProcess, ChildSpec
from pagemill.supervisor.logs import LogStream
from pagemill.supervisor.prober import Health, Prober

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "unready", "draining", "waiting", "stopped"]
"""waiting: for the next attempt after it exited. unready: it runs, but does not serve at the moment."""
SETTLE_S = 1.0
"""A process that shares its predecessor's socket is probed after this time: until then the predecessor responds."""
STABLE_S = 60.0
"""The exit of a process that has been ready for this long does not count as a failure."""
FIRST_RESTART_S = 0.5
"""The pause before the first restart, which doubles with every further consecutive failure."""
EXIT_USAGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Bounds in seconds."""

    stop_s: float = 30.0
    """Time from SIGTERM to SIGKILL."""
    start_s: float = 1200.0
    """Maximum time from starting a process until it is ready."""
    liveness_s: float = 120.0
    """Time of failing probes until it is replaced."""
    max_backoff_s: float = 60.0


@dataclass(slots=True)
class _Leaving:
    process: ChildProcess
    kill_at: float
    hurries: bool = False


class Member:
    """Keeps one child running. `tick` does the work; call it, and all other methods, on the main thread."""

    def __init__(self, spec: ChildSpec, logs: LogStream, timeouts: Timeouts) -> None:
        self.spec = spec
        self.generation = 0
        """Number of processes started so far."""
        self.was_ready = False
        self.was_killed = False
        """Whether a process had to be killed by SIGKILL since `stop`."""
        self.last_end = ""
        self._logs = logs
        self._timeouts = timeouts
        self._backoff = Backoff(FIRST_RESTART_S, timeouts.max_backoff_s)
        self._process: ChildProcess | None = None
        self._leaving: list[_Leaving] = []
        self._wanted = False
        self._start_at = 0.0
        self._ready_since: float | None = None
        self._since = time.time()
        self._state: State = "stopped"
        ready_path = (
            "/healthz" if spec.kind == "exporter" else "/readyz"
        )  # it reads every queue to respond to the latter
        self._prober = Prober(spec.url, spec.name, ready_path=ready_path)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_ready(self) -> bool:
        return self._state == "ready"

    @property
    def failures(self) -> int:
        """Consecutive failures."""
        return self._backoff.failures

    @property
    def is_gone(self) -> bool:
        return self._process is None and not self._leaving

    @property
    def is_refused(self) -> bool:
        """Whether it reported an invalid setting before it ever served: another attempt would fail in the same way."""
        return not self.was_ready and self.last_end == f"exit code {EXIT_USAGE}"

    def pids(self) -> list[tuple[int, float | None]]:
        """Return the ids and creation times of its processes."""
        running = [self._process] if self._process is not None else []
        return [
            (process.pid, process.identity) for process in (*running, *(one.process for one in self._leaving))
        ]

    def start(self) -> None:
        self._wanted = True
        self._start_at = 0.0

    def stop(self) -> None:
        self._wanted = False
        self.was_killed = False
        self._dismiss()

    def hurry(self) -> None:
        """Send a second signal to draining processes: a worker requeues its jobs immediately."""
        for one in self._leaving:
            if not one.hurries:
                one.hurries = True
                one.process.signal(signal.SIGINT)  # a gateway ignores a second SIGTERM

    def kill(self) -> None:
        for one in self._leaving:
            one.kill_at = 0.0

    def tick(self, now: float, *, is_urgent: bool = False) -> None:
        """Reap, judge and start. `now`: monotonic seconds; `is_urgent`: a caller waits for its state."""
        self._reap(now)
        if self._process is not None:
            self._judge(self._process, now)
        if self._process is None and self._wanted and now >= self._start_at and self._may_start():
            self._spawn()
        self._prober.is_urgent = is_urgent or self._state == "starting"
        self._set_state(self._find_state())

    def describe(self) -> dict[str, Any]:
        process = self._process or next((one.process for one in self._leaving), None)
        wait_s = self._start_at - time.monotonic() if self._state == "waiting" else 0.0
        return {
            "name": self.name,
            "kind": self.spec.kind,
            "state": self._state,
            "since": round(self._since, 3),
            "pid": process.pid if process is not None else None,
            "url": self.spec.url,
            "devices": list(self.spec.devices),
            "threads": self.spec.threads,
            "starts": self.generation,
            "failures": self.failures,
            "last_end": self.last_end or None,
            "next_start_s": round(max(0.0, wait_s), 1) if self._state == "waiting" else None,
        }

    def close(self) -> None:
        self._prober.close()

    def _may_start(self) -> bool:
        return not self._leaving or self.spec.shares_nothing

    def _spawn(self) -> None:
        try:
            self._process = ChildProcess(self.spec, self._logs)
        except OSError as error:  # no memory, or the process limit is reached
            self._failed(f"it can't be started: {error}", time.monotonic())
            return
        self.generation += 1
        self._ready_since = None
        self._prober.watch(self._process.pid)
        logger.info("%s: started as process %d", self.name, self._process.pid)

    def _reap(self, now: float) -> None:
        for one in list(self._leaving):
            if (code := one.process.exit_code()) is not None:
                self._leaving.remove(one)
                self.last_end = ending(code)
                logger.info("%s: process %d has ended, %s", self.name, one.process.pid, self.last_end)
            elif now >= one.kill_at:
                logger.error("%s: process %d did not end in time; killing it", self.name, one.process.pid)
                self.was_killed = True
                one.process.kill()
                one.kill_at = now + self._timeouts.stop_s

    def _judge(self, process: ChildProcess, now: float) -> None:
        """Evaluate the exit code and the probes of the running process."""
        if (code := process.exit_code()) is not None:
            self._process = None
            self._prober.watch(None)
            self.last_end = ending(code)
            self._failed(f"process {process.pid} has exited unexpectedly, {self.last_end}", now)
            return
        health = self._health(process)
        if health is not None and health.is_ready:
            if self._ready_since is None:
                self._ready_since = now
                logger.info("%s: ready at %s", self.name, self.spec.url)
            self.was_ready = True
            if now >= self._ready_since + STABLE_S:
                self._backoff.reset()
        if self._ready_since is None and now - process.started_at > self._timeouts.start_s:
            self._replace(f"it is not ready after {self._timeouts.start_s:.0f} s", now)
        elif health is not None and health.unhealthy_since is not None:
            unhealthy_s = now - health.unhealthy_since
            if unhealthy_s > self._timeouts.liveness_s:
                self._replace(f"/healthz has failed for {unhealthy_s:.0f} s", now)

    def _replace(self, reason: str, now: float) -> None:
        self._dismiss()
        self._failed(reason, now)

    def _failed(self, reason: str, now: float) -> None:
        if self._ready_since is not None and now >= self._ready_since + STABLE_S:
            self._backoff.reset()
        wait_s = self._backoff.next()
        self._start_at = now + wait_s
        if self._backoff.is_loud:
            times = f" ({self.failures} times in a row)" if self.failures > 1 else ""
            logger.error("%s: %s%s; next attempt in %.1f s", self.name, reason, times, wait_s)

    def _dismiss(self) -> None:
        """Ask the running process to drain."""
        if (process := self._process) is None:
            return
        self._process = None
        self._prober.watch(None)
        process.signal(signal.SIGTERM)
        self._leaving.append(_Leaving(process, time.monotonic() + self._timeouts.stop_s))

    def _health(self, process: ChildProcess) -> Health | None:
        """Return the probes' results if they belong to this process."""
        health = self._prober.health
        if health is None or health.pid != process.pid:
            return None
        if self.spec.shares_nothing and health.asked_at - process.started_at < SETTLE_S:
            return None
        return health

    def _find_state(self) -> State:
        if self._process is not None:
            if self._ready_since is None:
                return "starting"
            health = self._health(self._process)
            return "ready" if health is None or health.is_ready else "unready"
        if self._leaving:
            return "draining"
        return "waiting" if self._wanted else "stopped"

    def _set_state(self, state: State) -> None:
        if state != self._state:
            self._state, self._since = state, time.time()


def ending(code: int) -> str:
    """Describe an exit code."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
