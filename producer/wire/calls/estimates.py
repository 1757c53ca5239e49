"""Estimates of when a job ends, from the jobs ahead of it and the speed of its workers, corrected by the
accuracy of earlier estimates.

The estimate is the time in which the workers finish the jobs ahead, at the speed measured with all rows
occupied, plus the job's own time. It is multiplied by the median, and the ninth decile, of the ratio of
earlier jobs' time to their estimates (split conformal prediction, with the ratio as the score; Lei et al.
2018, arXiv:1604.04173). Jobs that start immediately and jobs that wait are treated separately.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pagemill.producer.wire.calls.metering.quotas import TenantQuotas, read_lines
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.completion_estimate import CompletionEstimate
from pagemill.producer.wire.server.scripts import Call, as_map

Kind = Literal["now", "later"]

FIRST_RATIOS = (0.6, 0.8, 0.9, 1.0, 1.0, 1.1, 1.3, 1.8)
"""Assumed ratios before any job has been scored; they weigh as much as that many jobs."""


@dataclass(frozen=True, slots=True)
class WaitingLane:
    """The waiting jobs of a tenant, if they precede those of lower classes."""

    priority: str
    tenant: str
    weight: float
    jobs: int
    mean_cost: float


@dataclass(frozen=True, slots=True)
class EstimateInputs:
    """The data for an estimate. Times are unix milliseconds by the server's clock."""

    now: int
    is_paused: bool
    rate: float | None
    """Jobs that may start per second."""
    running: int
    lanes: tuple[WaitingLane, ...]
    workers: tuple[WorkerInfo, ...]
    kept: dict[Kind, tuple[float, ...]]
    """The latest ratios of jobs' times to their estimates."""
    left: TenantQuotas | None = None
    """The remaining quotas of the lane's tenant; None if it has none."""


@dataclass(frozen=True, slots=True)
class JobDemand:
    """A job as its header describes it."""

    lane: str
    cost: int
    due: int
    """Unix milliseconds from which it may run; 0: immediately."""
    deadline: int | None
    rows: int = 1

    @classmethod
    def from_header(cls, header: bytes, now: int) -> JobDemand:
        fields: dict[str, Any] = json.loads(header)
        due = max(fields.get("run_at", 0), now + fields["delay"] if "delay" in fields else 0)
        ends = [fields["deadline"]] if "deadline" in fields else []
        ends += [now + fields["ttl"]] if "ttl" in fields else []
        rows = fields.get("width", fields.get("n", 1))
        return cls(fields["lane"], fields["cost"], due, min(ends, default=None), rows)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The computed end of a job, and its range by earlier ones. Times are milliseconds."""

    kind: Kind
    start: int
    """Unix milliseconds from which the others are counted."""
    estimate: int
    p50: int
    p90: int
    wait: int = field(default=0, compare=False)
    """The part of `p50` before it starts. Not part of the header's field."""

    @classmethod
    def read(cls, text: str) -> Estimate:
        """Read a header's field. Raises ValueError."""
        kind, *numbers = text.split(":")
        if kind not in ("now", "later") or len(numbers) != 4:
            raise ValueError("not an estimate")
        return cls("now" if kind == "now" else "later", *map(int, numbers))

    def __str__(self) -> str:
        return f"{self.kind}:{self.start}:{self.estimate}:{self.p50}:{self.p90}"

    def completion(self, deadline: int | None) -> CompletionEstimate:
        p50, p90 = ((self.start + after) / 1000 for after in (self.p50, self.p90))
        return CompletionEstimate(p50, p90, None if deadline is None else deadline / 1000, self.wait / 1000)

    def ratio(self, ended_at: float) -> float:
        """Return the time that the job took until `ended_at` (unix seconds), relative to its median."""
        return max(0.0, ended_at * 1000 - self.start) / max(1, self.p50)


def estimate_inputs(queue: str, lane: str) -> Call[EstimateInputs]:
    """Read the data to estimate when a job of that lane would end if it were submitted now."""
    return Call("estimate", (keys.prefix(queue),), (lane,), _read_inputs)


def estimated_end(seen: EstimateInputs, asked: JobDemand) -> Estimate | None:
    """Return None if the end is unknown: no worker of the model has measured a speed, or the queue is paused."""
    speeds = [worker.speed for worker in seen.workers if worker.speed is not None]
    rows = sum(speed.rows for speed in speeds)
    busy_rate = sum(speed.rows * speed.busy_rate for speed in speeds)
    if seen.is_paused or not busy_rate:
        return None
    jobs, cost = _ahead(seen.lanes, asked.lane)
    free = max(0, rows - seen.running)
    waits = jobs >= free
    start = max(seen.now, asked.due)
    if waits:
        wait_s = cost * (jobs - free) / jobs / busy_rate if jobs else 0.0
        wait_s = max(0.0, wait_s - (start - seen.now) / 1000)
        rate = busy_rate / rows
    else:
        wait_s = 0.0
        rate = sum(speed.rows * speed.free_rate for speed in speeds) / rows
    if seen.rate is not None:
        wait_s = max(wait_s, jobs / seen.rate)
    kind: Kind = "later" if waits else "now"
    milliseconds = max(1, math.ceil(1000 * (wait_s + asked.cost / asked.rows / rate)))
    half, most = (_quantile(seen.kept[kind], share) for share in (0.5, 0.9))
    p50, p90 = (math.ceil(milliseconds * ratio) for ratio in (half, most))
    return Estimate(kind, start, milliseconds, p50, p90, wait=round(1000 * wait_s * half))


def _ahead(lanes: Sequence[WaitingLane], lane: str) -> tuple[int, float]:
    """Return the number of jobs ahead of a new one of that lane, and their total cost."""
    _, priority, tenant, _ = keys.split_lane(lane)
    own = [one for one in lanes if (one.priority, one.tenant) == (priority, tenant)]
    turns = (1 + sum(one.jobs for one in own)) / max((one.weight for one in own), default=1.0)
    jobs, cost = 0.0, 0.0
    for one in lanes:
        is_rival = one.priority == priority and one.tenant != tenant
        before = min(one.jobs, turns * one.weight) if is_rival else one.jobs
        jobs += before
        cost += before * one.mean_cost
    return round(jobs), cost


def _quantile(kept: Sequence[float], share: float) -> float:
    """Return the ratio that a new one stays below with that probability, if it is exchangeable with earlier ones."""
    ratios = sorted((*FIRST_RATIOS, *kept))
    return ratios[min(len(ratios), math.ceil(share * (len(ratios) + 1))) - 1]


def _read_inputs(reply: list[Any]) -> EstimateInputs:
    found = as_map(reply)
    names = {letter: priority for priority, letter in keys.PRIORITY_CLASSES.items()}
    return EstimateInputs(
        now=int(found["now"]),
        is_paused=bool(found["paused"]),
        rate=float(found["rate"]) if found["rate"] else None,
        running=found["running"],
        lanes=tuple(
            WaitingLane(
                names[level.decode()],
                tenant.decode(),
                float(weight),
                jobs,
                sum(map(float, costs)) / len(costs) if costs else 0.0,
            )
            for level, tenant, weight, jobs, costs, *_ in found["lanes"]
        ),
        workers=tuple(map(WorkerInfo.model_validate_json, found["workers"])),
        kept={"now": tuple(map(float, found["kept_now"])), "later": tuple(map(float, found["kept_later"]))},
        left=next(iter(read_lines([found["quotas"]] if found["quotas"] else []).values()), None),
    )
