"""The last ten minutes as columns of one-second points, for the live page's charts."""

from __future__ import annotations

import time
from collections import deque

from pagemill.engine.outputs import EngineStats

POINTS = 600
COLUMNS = ("time", "active", "occupied", "generated", "computed", "running", "waiting", "queued")
"""Unix seconds; fractions of the KV pool in use, and in use or cached; tokens per second; sequences; jobs."""

Point = dict[str, float | None]


class LiveHistory:
    """One point per call of `sample`. Rates are differences of the engine's counters, so no event is lost."""

    def __init__(self, points: int = POINTS) -> None:
        self._points: deque[Point] = deque(maxlen=points)
        self._last: tuple[float, EngineStats] | None = None

    def sample(self, engine: EngineStats | None, queued: int | None) -> Point:
        """Add a point. Unknown values (a model that is loading, an unreachable Redis) are None."""
        point: Point = dict.fromkeys(COLUMNS)
        point["time"] = round(time.time(), 3)
        point["queued"] = queued
        if engine is not None:
            kv = engine.kv
            point["active"] = round(kv.utilization, 4)
            point["occupied"] = round((kv.active_blocks + kv.cached_blocks) / max(1, kv.capacity_blocks), 4)
            point["running"] = engine.scheduler.running
            point["waiting"] = engine.scheduler.waiting
            point["generated"], point["computed"] = self._rates(engine)
        self._points.append(point)
        return point

    @property
    def latest(self) -> Point | None:
        return self._points[-1] if self._points else None

    def columns(self) -> dict[str, list[float | None]]:
        """Return every point, as one list per column."""
        points = list(self._points)
        return {name: [point[name] for point in points] for name in COLUMNS}

    def _rates(self, engine: EngineStats) -> tuple[float, float]:
        now = time.monotonic()
        before, self._last = self._last, (now, engine)
        if before is None:
            return 0.0, 0.0
        elapsed = max(1e-3, now - before[0])
        generated = engine.requests.generated_tokens - before[1].requests.generated_tokens
        computed = engine.steps.computed_tokens - before[1].steps.computed_tokens
        return round(generated / elapsed, 1), round(computed / elapsed, 1)
