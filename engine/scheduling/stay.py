"""Breakdown of a request's time in the engine: sums per request, and per step for the batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pagemill.engine.outputs import StayCause, WaitReason

_REASONS: tuple[WaitReason, ...] = ("rows", "kv", "budget")


@dataclass(slots=True)
class Occupancy:
    """Sums over all steps: sequences in the batch times seconds, and waiting time in seconds by reason."""

    row_seconds: float = 0.0
    waited: dict[WaitReason, float] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0.0))
    _ticked_at: float = 0.0

    def tick(self, num_running: int, waiting_for: WaitReason | None) -> None:
        """Add the time since the last step was planned; None: no request waited."""
        now = time.monotonic()
        passed = now - self._ticked_at if self._ticked_at else 0.0
        self._ticked_at = now
        self.row_seconds += num_running * passed
        if waiting_for is not None:
            self.waited[waiting_for] += passed


class Stay:
    """Seconds of one request by cause; exactly one cause counts at a time.

    Recomputation after a preemption counts as the preemption, up to the next token.
    """

    __slots__ = ("_before", "_occupancy", "_row_seconds", "_since", "cause", "seconds")

    def __init__(self) -> None:
        self.seconds: dict[StayCause, float] = {}
        self.cause: StayCause = "adapter"
        self._since = time.monotonic()
        self._occupancy = Occupancy()
        self._before: tuple[float, ...] = ()
        self._row_seconds = 0.0

    def enter(self, cause: StayCause, now: float | None = None) -> None:
        """Add the time so far to the current cause, and switch to this one."""
        now = time.monotonic() if now is None else now
        self.seconds[self.cause] = self.seconds.get(self.cause, 0.0) + max(0.0, now - self._since)
        if (self.cause == "decode") != (cause == "decode"):
            sign = -1 if cause == "decode" else 1
            self._row_seconds += sign * self._occupancy.row_seconds
        self.cause, self._since = cause, now

    def wait(self, occupancy: Occupancy) -> None:
        """Start waiting for a place in the batch."""
        self._occupancy = occupancy
        self._before = tuple(occupancy.waited.values())
        self.enter("budget")

    def admitted(self) -> None:
        """End the wait for the first place in the batch; record it under the resource that was short."""
        if self.cause != "budget":
            return
        self.enter("prompt")
        waited = self.seconds.pop("budget")
        short = [
            after - before
            for before, after in zip(self._before, self._occupancy.waited.values(), strict=True)
        ]
        total = sum(short)
        for reason, seconds in zip(_REASONS, short if total else (0.0, 0.0, 1.0), strict=True):
            self.seconds[reason] = self.seconds.get(reason, 0.0) + waited * seconds / (total or 1.0)

    def report(self, num_sequences: int, now: float) -> dict[StayCause, int]:
        """Return milliseconds by cause up to now. `others` is the mean number of other sequences in the batch while it
        decoded, in tenths."""
        self.enter("others", now)
        decode_s = self.seconds.get("decode", 0.0)
        report = {cause: round(seconds * 1000) for cause, seconds in self.seconds.items()}
        if decode_s > 0:
            report["others"] = max(0, round(10 * (self._row_seconds / decode_s - num_sequences)))
        return report
