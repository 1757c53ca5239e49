"""The supervisor's loop: one thread that starts, watches and ends every child."""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from pagemill.supervisor.child import ChildSpec
from pagemill.supervisor.control import Commands, ControlServer, Refused
from pagemill.supervisor.logs import LogStream
from pagemill.supervisor.member import EXIT_USAGE, Member, Patience
from pagemill.supervisor.notify import ServiceManager
from pagemill.supervisor.rollout import Rollout
from pagemill.supervisor.run_directory import RunDirectory

logger = logging.getLogger(__name__)

TICK_S = 0.1
EXIT_OK = 0
EXIT_FAILED = 1


class Server(Protocol):
    """An embedded Redis, restarted where it has died."""

    def revive(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is run, and how it is described again for a restart."""

    specs: Sequence[ChildSpec]
    patience: Patience
    describe: Callable[[], Sequence[ChildSpec]]
    """Reads the settings anew. Raises ValueError, with a message for the operator."""
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
        self._members = [Member(spec, logs, fleet.patience) for spec in fleet.specs]
        self._wake = threading.Event()
        self._stops = 0
        """How often it was asked to stop: to drain, to hurry, to kill."""
        self._restarts: queue.SimpleQueue[queue.SimpleQueue[Rollout | Refused]] = queue.SimpleQueue()
        self._hung_up = False
        self._rollout: Rollout | None = None
        self._was_ready = False
        self._has_refused = False
        self._snapshot: dict[str, Any] = {}
        self._written: Any = None
        self._started_at = time.time()

    def run(self) -> int:
        """Run until all has ended. Returns 0 after a drain, 1 if something had to be killed, 2 for a wrong setting."""
        self._install_signals()
        for member in self._members:
            member.start()
        commands = Commands(status=lambda: self._snapshot, restart=self._ask_restart, stop=self._ask_stop)
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
        is_urgent = not self._was_ready or self._rollout is not None
        for member in self._members:
            member.tick(now, is_urgent=is_urgent)
        self._look_at_starts()
        self._look_at_restarts()
        if self._server is not None:
            self._revive(self._server)
        self._tell(now)

    def _look_at_starts(self) -> None:
        if self._was_ready:
            return
        for member in self._members:
            if member.is_refused:
                logger.error("%s refuses its settings, as its last line says; ending", member.name)
                self._has_refused = True
                self._stops = max(self._stops, 1)
        if all(member.is_ready for member in self._members):
            self._was_ready = True
            logger.info("all ready: %s", ", ".join(member.name for member in self._members))
            self._manager.tell(READY=1)

    def _look_at_restarts(self) -> None:
        if self._hung_up:
            self._hung_up = False
            outcome = self._begin_restart()
            if isinstance(outcome, Refused):
                logger.error("no restart: %s", outcome)
        while not self._restarts.empty():
            self._restarts.get().put(self._begin_restart())
        if self._rollout is not None:
            self._rollout.advance()
            if self._rollout.is_over:
                self._rollout = None

    def _begin_restart(self) -> Rollout | Refused:
        if self._rollout is not None:
            return Refused("a restart is under way already")
        try:
            specs = {spec.name: spec for spec in self._fleet.describe()}
        except ValueError as error:
            return Refused(f"the settings won't do, so nothing was restarted: {error}")
        if set(specs) != {member.name for member in self._members}:
            return Refused(
                "the settings now name other workers, or add or drop the gateway or the exporter: "
                "that takes a new start of pagemill up"
            )
        self._rollout = Rollout(self._members, [specs[member.name] for member in self._members])
        return self._rollout

    def _revive(self, server: Server) -> None:
        try:
            server.revive()
        except (
            Exception
        ) as error:  # a full disk, or whatever keeps a server from starting: the next tick tries again
            logger.error("the embedded server can't be started again: %s", error)
            time.sleep(1.0)

    def _drain(self) -> None:
        """End all children, whatever was going on."""
        self._manager.tell(STOPPING=1)
        if self._rollout is not None:
            self._rollout.abandon("abandoned: all is being stopped")
        logger.info("stopping: up to %.0f s for running jobs and requests", self._fleet.patience.stop_s)
        for member in self._members:
            member.stop()
        told = 1
        while not all(member.is_gone for member in self._members):
            now = time.monotonic()
            for member in self._members:
                member.tick(now)
                if self._stops > 1:
                    member.hurry()
                if self._stops > 2:
                    member.kill()
            if self._stops > told:
                told = self._stops
                logger.info("stopping %s", "at once" if told > 2 else "faster: jobs are handed back")
            self._tell(now)
            self._wake.wait(TICK_S)
            self._wake.clear()
        logger.info("all have ended")

    def _tell(self, now: float) -> None:
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
            self._manager.tell_status(f"{state}: {ready} of {len(self._members)} ready")

    def _state(self, ready: int) -> str:
        if self._stops:
            return "stopping"
        if self._rollout is not None:
            return "restarting"
        if ready == len(self._members):
            return "ready"
        return "degraded" if self._was_ready else "starting"

    def _ask_stop(self, hurry: bool) -> None:
        self._stops = max(2 if hurry else 1, self._stops)
        self._wake.set()

    def _ask_restart(self) -> Rollout:
        answer: queue.SimpleQueue[Rollout | Refused] = queue.SimpleQueue()
        self._restarts.put(answer)
        self._wake.set()
        while not self._stops:
            try:
                outcome = answer.get(timeout=1.0)
            except queue.Empty:
                continue
            if isinstance(outcome, Refused):
                raise outcome
            return outcome
        raise Refused("it is being stopped")

    def _install_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        hangup = getattr(signal, "SIGHUP", None)
        if hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN:
            signal.signal(hangup, self._on_stop if _has_terminal() else self._on_hangup)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1  # the loop looks: an Event's lock may be held by the code that is interrupted

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        self._hung_up = True


def _has_terminal() -> bool:
    """Return whether SIGHUP means that a terminal was closed, and not that an operator asks for a restart."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
