"""The supervisor's loop: one thread that starts, watches and stops every child."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from pagemill.producer.wire.process.stop_signals import stop_signals
from pagemill.supervisor.child import ChildSpec
from pagemill.supervisor.control import Commands, ControlServer
from pagemill.supervisor.logs import LogStream
from pagemill.supervisor.member import EXIT_USAGE, Member, Timeouts
from pagemill.supervisor.notify import ServiceManager
from pagemill.supervisor.run_directory import RunDirectory

logger = logging.getLogger(__name__)

TICK_S = 0.1
EXIT_OK = 0
EXIT_FAILED = 1


class Server(Protocol):
    """An embedded Redis, restarted after a crash."""

    def revive(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The components to run."""

    specs: Sequence[ChildSpec]
    timeouts: Timeouts
    facts: dict[str, Any]
    """Of `status`: queue, Redis."""


class Supervisor:
    """Runs a fleet until SIGTERM or SIGINT. Call `run` on the main thread."""

    def __init__(
        self,
        fleet: Fleet,
        directory: RunDirectory,
        logs: LogStream,
        manager: ServiceManager,
        server: Server | None,
    ) -> None:
        """`server`: an embedded one that this process owns."""
        self._fleet = fleet
        self._directory = directory
        self._manager = manager
        self._server = server
        self._members = [Member(spec, logs, fleet.timeouts) for spec in fleet.specs]
        self._wake = threading.Event()
        self._stops = 0
        """Number of stop requests: drain, hurry, kill."""
        self._was_ready = False
        self._has_refused = False
        self._snapshot: dict[str, Any] = {}
        self._written: Any = None
        self._started_at = time.time()

    def run(self) -> int:
        """Run until all children have exited. Return 0 after a drain, 1 if any was killed, 2 for a wrong setting."""
        self._install_signals()
        for member in self._members:
            member.start()
        commands = Commands(status=lambda: self._snapshot, stop=self._request_stop)
        control: ControlServer | None = None
        try:
            self._tick()
            control = ControlServer(self._directory.socket_path, commands)
            while not self._stops:
                self._wake.wait(TICK_S)
                self._wake.clear()
                self._tick()
        finally:
            self._drain()
            if control is not None:
                control.close()
            for member in self._members:
                member.close()
        if self._has_refused:
            return EXIT_USAGE
        return EXIT_FAILED if any(member.was_killed for member in self._members) else EXIT_OK

    def _tick(self) -> None:
        now = time.monotonic()
        for member in self._members:
            member.tick(now, is_urgent=not self._was_ready)
        self._check_startup()
        if self._server is not None:
            self._revive(self._server)
        self._publish_state(now)

    def _check_startup(self) -> None:
        if self._was_ready:
            return
        for member in self._members:
            if member.is_refused:
                logger.error("%s rejects its settings (see its last line); exiting", member.name)
                self._has_refused = True
                self._stops = max(self._stops, 1)
        if all(member.is_ready for member in self._members):
            self._was_ready = True
            logger.info("all ready: %s", ", ".join(member.name for member in self._members))
            self._manager.notify(READY=1)

    def _revive(self, server: Server) -> None:
        try:
            server.revive()
        except (
            Exception
        ) as error:  # a full disk, or another obstacle to the server's start: the next tick tries again
            logger.error("the embedded server can't be started again: %s", error)
            time.sleep(1.0)

    def _drain(self) -> None:
        """Stop all children, in any state."""
        self._manager.notify(STOPPING=1)
        logger.info("stopping: up to %.0f s for running jobs and requests", self._fleet.timeouts.stop_s)
        for member in self._members:
            member.stop()
        num_announced = 1
        while not all(member.is_gone for member in self._members):
            now = time.monotonic()
            for member in self._members:
                member.tick(now)
                if self._stops > 1:
                    member.hurry()
                if self._stops > 2:
                    member.kill()
            if self._stops > num_announced:
                num_announced = self._stops
                logger.info(
                    "stopping %s", "immediately" if num_announced > 2 else "faster: jobs are requeued"
                )
            self._publish_state(now)
            self._wake.wait(TICK_S)
            self._wake.clear()
        logger.info("all have ended")

    def _publish_state(self, now: float) -> None:
        self._manager.beat(now)
        described = [member.describe() for member in self._members]
        ready = sum(member.is_ready for member in self._members)
        state = self._state(ready)
        self._snapshot = {
            "pid": os.getpid(),
            "state": state,
            "started_at": round(self._started_at, 3),
            **self._fleet.facts,
            "members": described,
            "processes": [pid for member in self._members for pid in member.pids()],
        }
        lasting = (state, [{**one, "next_start_s": None} for one in described], self._snapshot["processes"])
        if lasting != self._written:
            self._written = lasting
            self._directory.write_state(self._snapshot)
            self._manager.notify_status(f"{state}: {ready} of {len(self._members)} ready")

    def _state(self, ready: int) -> str:
        if self._stops:
            return "stopping"
        if ready == len(self._members):
            return "ready"
        return "degraded" if self._was_ready else "starting"

    def _request_stop(self, hurry: bool) -> None:
        self._stops = max(2 if hurry else 1, self._stops)
        self._wake.set()

    def _install_signals(self) -> None:
        for number in stop_signals():
            signal.signal(number, self._on_stop)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1  # the loop checks it: an Event's lock may be held by the interrupted code
