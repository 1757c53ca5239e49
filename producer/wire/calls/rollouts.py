"""Rollouts: a new revision of a model receives a share of its jobs (docs/rollouts.md, features/rollouts.lua)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pagemill.producer.wire.calls.registry import StatsPage
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call, as_map

Side = Literal["stable", "canary"]
SIDES: tuple[Side, ...] = get_args(Side)
State = Literal["open", "halted", "back", "ended"]
"""open: the canary has its share. halted: it gets no new jobs. back: it gets none at all, the old revision
has them. ended: the two sides are merged."""
By = Literal["id", "tenant", "batch"]
ChangeReply = Literal["ok", "none", "busy", "over"]
SHARES = 10_000
MOVED_BACK = 250
"""Number of jobs that one call of `move_back` moves."""
DEFAULT_MARGIN = 0.05
DEFAULT_LEAST = 20
MAX_LEAST = 200
"""Maximum of `least`: the counts for a halt are halved at 400 executions, so they never fall below 200."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """The arguments of `start`. `share` and `margin` are fractions."""

    to: str
    share: float
    by: By = "id"
    """What decides the side of a job: its id, its tenant, or its batch (its id if it has none)."""
    margin: float = DEFAULT_MARGIN
    """The canary is halted if its failure rate exceeds the stable side's by more than this; 1: never."""
    least: int = DEFAULT_LEAST
    """Minimum number of the canary's executions before a halt."""


@dataclass(frozen=True, slots=True)
class SideFigures:
    """The statistics of one side since the start."""

    workers: int
    """Number of live workers."""
    jobs: int
    """Executions that ended in success, in an error or in a crash of their worker."""
    failures: int
    run_p50_s: float | None
    """Median of the latest 256 successful ones, from pull to commit; None if there were none."""
    run_p90_s: float | None
    waiting: int = 0
    oldest_s: float = 0.0

    @property
    def failure_rate(self) -> float:
        """Failures per job, 0 without jobs."""
        return self.failures / self.jobs if self.jobs else 0.0


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """A rollout and its two sides. Times are Unix seconds."""

    model: str
    state: State
    to: str
    share: float
    by: By
    margin: float
    least: int
    started_at: float
    changed_at: float
    halted_for: str | None
    """`failures` if the canary failed too often; None if an operator halted it, or it is not halted."""
    canary: SideFigures
    stable: SideFigures
    compared: int = 0
    """Jobs of the canary that the last `compare` also ran on the stable side."""
    agreed: int = 0


def start(queue: str, model: str, rollout: Rollout) -> Call[ChangeReply]:
    """Open a rollout.

    busy: one to another revision or with another `by` is open or halted, or the last canary's jobs still wait.
    """
    shares = _shares(rollout.share), rollout.to, rollout.by, _shares(rollout.margin), rollout.least
    return _change(queue, model, "start", *shares)


def set_share(queue: str, model: str, share: float) -> Call[ChangeReply]:
    """Change the canary's share; a halted rollout resumes."""
    return _change(queue, model, "raise", _shares(share))


def halt(queue: str, model: str) -> Call[ChangeReply]:
    """Send no new jobs to the canary until its share is set again."""
    return _change(queue, model, "halt")


def roll_back(queue: str, model: str) -> Call[ChangeReply]:
    """Send no jobs to the canary until the next rollout."""
    return _change(queue, model, "back")


def end(queue: str, model: str) -> Call[ChangeReply]:
    """Merge the two sides: all workers of the model take all of its jobs."""
    return _change(queue, model, "end")


def forget(queue: str, ended: RolloutStatus) -> Call[ChangeReply]:
    """Delete an ended rollout and its counters.

    busy: the rollout has been changed since `ended` was read, or jobs must be moved back first.
    """
    return _change(queue, ended.model, "forget", round(1000 * ended.changed_at))


def move_back(queue: str, model: str) -> Call[int]:
    """Move some jobs of a canary that no longer accepts jobs to the other workers. Returns the number left."""
    return Call("rollout_back", (keys.prefix(queue),), (model, MOVED_BACK), int)


def statuses(queue: str, models: Sequence[str] = ()) -> Call[list[RolloutStatus]]:
    """Return the rollouts of these models, or all of them, without waiting jobs."""
    return Call(
        "rollouts", (keys.prefix(queue),), tuple(models), lambda reply: [_status(row) for row in reply]
    )


def sample(queue: str, model: str) -> Call[list[str]]:
    """Return canary jobs whose input was kept: up to 200 since the last change of the share."""
    return Call("rollout_sample", (keys.prefix(queue),), (model, "", ""), _ids)


def note_agreement(queue: str, model: str, compared: int, agreed: int) -> Call[list[str]]:
    """Store the outcome of a comparison, for the status and the dashboard."""
    return Call("rollout_sample", (keys.prefix(queue),), (model, compared, agreed), _ids)


def add_waiting(found: dict[Side, tuple[int, float]], page: StatsPage, model: str, canary: str) -> None:
    """Add the waiting jobs of a model at each side, and the age of the oldest in seconds.

    `canary` is its revision: jobs that name it wait in the same lanes and are counted, unlike others.
    """
    sides: dict[str | None, Side] = {None: "stable", canary: "canary"}
    for lane, (jobs, age_s) in page.lanes.items():
        side = sides.get(keys.pinned_revision(lane))
        if side is not None and keys.split_lane(lane)[3].partition("#")[0] == model:
            found[side] = (found[side][0] + jobs, max(found[side][1], age_s))


def parse_share(text: str) -> float:
    """Read `5%` or `0.05`. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value <= 1:
        raise ValueError("a share is a percentage such as 5%, or a fraction such as 0.05")
    return value


def _shares(fraction: float) -> int:
    return round(fraction * SHARES)


def _change(queue: str, model: str, action: str, *args: str | int) -> Call[ChangeReply]:
    return Call("rollout", (keys.prefix(queue),), (model, action, *args), _word)


def _word(reply: bytes) -> Any:
    return reply.decode()


def _ids(reply: list[bytes]) -> list[str]:
    return [job_id.decode() for job_id in reply]


def _status(row: list[Any]) -> RolloutStatus:
    found = as_map(row)
    state, share, by, to = found["rollout"].decode().split()
    counted = {name: value.decode() for name, value in as_map(found["counted"]).items()}
    canaries: int = found["canary_workers"]

    def number(name: str, default: int = 0) -> int:
        return int(float(counted.get(name, default)))

    def side(name: Side, live: int, runs_ms: list[bytes]) -> SideFigures:
        runs = sorted(int(run) / 1000 for run in runs_ms)
        jobs, failures = number(f"{name}:jobs"), number(f"{name}:failures")
        return SideFigures(live, jobs, failures, _quantile(runs, 0.5), _quantile(runs, 0.9))

    return RolloutStatus(
        model=found["model"].decode(),
        state=state,
        to=to,
        share=int(share) / SHARES,
        by=by,
        margin=number("margin", SHARES) / SHARES,
        least=number("least"),
        started_at=number("started_at") / 1000,
        changed_at=number("changed_at") / 1000,
        halted_for=counted.get("reason"),
        canary=side("canary", canaries, found["canary_ms"]),
        stable=side("stable", max(0, found["workers"] - canaries), found["stable_ms"]),
        compared=number("compared"),
        agreed=number("agreed"),
    )


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None
