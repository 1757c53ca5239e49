"""A rolling restart: one member at a time, the next when all workers are ready again."""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence

from pagemill.supervisor.child import ChildSpec
from pagemill.supervisor.member import Member

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
"""A successor that has ended this often in a row stops the restart: the rest stays as it is."""


class Rollout:
    """Restarts members in turn, from new specs. `advance` on the main thread; others read `events`.

    Workers come first, those that do not serve before the others: so there is never more than one worker less than
    there was. A worker drains before its successor starts, which needs its port and its device's memory. The gateway
    and the exporter come last.
    """

    def __init__(self, members: Sequence[Member], specs: Sequence[ChildSpec]) -> None:
        """`specs`: in the order of the members."""
        self.events: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Progress, a line each; None once it is over."""
        self.is_over = False
        self.is_success = False
        self._all = list(members)
        self._pending = list(zip(members, specs, strict=True))
        self._total = len(members)
        self._current: Member | None = None
        self._before: ChildSpec | None = None

    def advance(self) -> None:
        """Do what can be done now."""
        if self._current is not None:
            self._watch(self._current)
        if self._current is None and not self.is_over:
            self._begin_next()

    def abandon(self, reason: str) -> None:
        if not self.is_over:
            self._end(False, reason)

    def _watch(self, member: Member) -> None:
        if member.is_ready:
            self._tell(f"{member.name} is ready again")
            self._current = None
        elif member.failures >= MAX_FAILURES:
            assert self._before is not None
            left = ", ".join(other.name for other, _ in self._pending) or "none"
            member.restart(self._before)
            self._end(
                False,
                f"halted: the new {member.name} ended {MAX_FAILURES} times ({member.last_end}); it goes on with its "
                f"former settings. Not restarted: {left}",
            )

    def _begin_next(self) -> None:
        if not self._pending:
            self._end(True, "all are restarted")
            return
        self._pending.sort(key=lambda pair: (pair[0].spec.kind != "worker", pair[0].is_ready))
        member, spec = self._pending[0]
        others = [other for other in self._all if other.spec.kind == "worker" and other is not member]
        if member.is_ready and not all(other.is_ready for other in others):
            return  # one less already
        self._pending.pop(0)
        self._current, self._before = member, member.spec
        self._tell(f"restarting {member.name}, {self._total - len(self._pending)} of {self._total}")
        member.restart(spec)

    def _end(self, is_success: bool, reason: str) -> None:
        self._current = None
        self.is_over, self.is_success = True, is_success
        self._tell(reason)
        self.events.put(None)

    def _tell(self, line: str) -> None:
        logger.log(
            logging.INFO if not self.is_over or self.is_success else logging.ERROR,
            "rolling restart: %s",
            line,
        )
        self.events.put(line)
