"""A job's lifetime, split into causes that add up to it.

The queue records when a cause starts and ends for many jobs, and workers the duration of their part; nothing
is stored per job and event. A moment with several causes counts for the first of `BLOCKS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagemill.producer.wire.calls.history import Execution, JobHistory, read_history
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import WireModel
from pagemill.producer.wire.server.scripts import Call, as_map

Cause = Literal[
    "dependency", "delay", "equal_job", "retry_pause", "paused", "no_worker", "no_capability", "quota", "rate_limit",
    "behind", "opening", "adapter", "grammar", "sequence_slot", "kv_block", "step_budget", "prompt", "decode",
    "displaced", "preempted", "commit", "repeated", "running",
]  # fmt: skip

MEANINGS: dict[Cause, str] = {
    "dependency": "waited for other jobs to end",
    "delay": "was submitted to start later",
    "equal_job": "followed an equal job that ran",
    "retry_pause": "paused after a failed attempt",
    "paused": "the queue was paused",
    "no_worker": "no live worker served its model",
    "no_capability": "no live worker of its model knew all that it needs",
    "quota": "its tenant had used a quota, or ran as many jobs as it may",
    "rate_limit": "the queue's rate limit let no job start",
    "behind": "waited for room on a worker, behind other jobs",
    "opening": "its worker fetched, decrypted and prepared it",
    "adapter": "its adapter was not in memory",
    "grammar": "its grammar was compiled",
    "sequence_slot": "no sequence slot was free in the engine",
    "kv_block": "not enough KV blocks were free",
    "step_budget": "the token budget of the steps was used",
    "prompt": "its prompt was computed",
    "decode": "its output was generated",
    "displaced": "an urgent job had its place in the batch",
    "preempted": "it was preempted, and computed again",
    "commit": "its output was checkpointed and committed",
    "repeated": "a worker was lost: what it had not saved, and what was done again",
    "running": "it ran; no parts were reported",
}

LETTERS: dict[str, Cause] = {
    "o": "opening", "a": "adapter", "g": "grammar", "s": "sequence_slot", "k": "kv_block", "b": "step_budget",
    "p": "prompt", "d": "decode", "x": "displaced", "e": "preempted",
}  # fmt: skip
"""The letters of an execution's times in ms, in the order in which they count."""
ENGINE_LETTERS = {
    "adapter": "a", "grammar": "g", "rows": "s", "kv": "k", "budget": "b", "prompt": "p", "decode": "d",
    "displaced": "x", "preempted": "e", "others": "n",
}  # fmt: skip
"""The same by the engine's names. `n`: tenths of the mean number of other sequences in the batch while it
decoded; `c` has the prompt tokens that were cached."""

Span = tuple[int, int]
"""Start and end, in unix milliseconds."""
BLOCKS: tuple[Cause, ...] = ("paused", "no_worker", "no_capability", "quota", "rate_limit")
"""Causes that keep a job in its lane, in the order in which they count."""

MAX_SPENT = 64
"""Maximum bytes of an execution's times."""

_SPENT = re.compile(r"([a-z])(\d{1,12})")


class Part(WireModel):
    """A cause, and its total duration."""

    cause: Cause
    seconds: float


class Behind(WireModel):
    """Jobs of a tenant and priority that started while the job last waited."""

    tenant: str
    """Empty: tenants that were not distinguished."""
    priority: str
    jobs: int
    seconds: float
    """Their share of the wait behind other jobs, by number of jobs."""


class Earlier(WireModel):
    """How much sooner the job would have started, estimated from `behind`."""

    change: Literal["priority high", "one more worker"]
    seconds: float


class JobAccount(WireModel):
    """A breakdown of a job's time. `parts` add up to `seconds`."""

    id: str
    state: str
    model: str
    tenant: str
    seconds: float
    """Time since its submission, up to its end or now."""
    parts: tuple[Part, ...]
    behind: tuple[Behind, ...]
    earlier: tuple[Earlier, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens from the prefix cache; None: not reported."""
    decoded_beside: float | None = None
    """The mean number of other sequences while it decoded; None: not reported."""


class CauseSums(WireModel):
    """The durations of a cause in several jobs."""

    cause: Cause
    seconds: float
    """The sum over all jobs."""
    p50: float
    """Median of each job's seconds, which are 0 without the cause."""
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Run:
    """An execution. Times are unix milliseconds."""

    started_at: int
    ended_at: int | None
    queued_at: int | None = None
    saved_at: int | None = None
    outcome: str = "running"
    spent: str = ""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The data from which a job's account is computed. Times are unix milliseconds."""

    created_at: int
    ended_at: int
    """Its end, or now."""
    held: Cause
    """The cause that kept it out of its lane at first."""
    runs: tuple[Run, ...] = ()
    queued_at: int | None = None
    """When it last returned to its lane."""
    is_held: bool = False
    """True if it is not in its lane, or was not at its end."""
    blocks: tuple[tuple[Cause, tuple[Span, ...]], ...] = ()


class _Account:
    """Sums by cause up to a moment that only advances, from the job's submission to its end."""

    def __init__(self, life: Lifetime) -> None:
        self.sums: dict[Cause, int] = {}
        self._at = life.created_at
        self._end = max(life.created_at, life.ended_at)
        self._blocks = life.blocks

    def left_until(self, moment: int) -> int:
        return max(0, min(moment, self._end) - self._at)

    def spend(self, cause: Cause, milliseconds: int) -> None:
        spent = max(0, min(milliseconds, self._end - self._at))
        if spent:
            self.sums[cause] = self.sums.get(cause, 0) + spent
            self._at += spent

    def wait(self, until: int) -> None:
        """Count the time up to a moment as waiting in the lane."""
        rest = [(self._at, self._at + self.left_until(until))]
        blocked: list[tuple[Cause, int]] = []
        for cause, spans in self._blocks:
            left = without(rest, spans)
            blocked.append((cause, length(rest) - length(left)))
            rest = left
        for cause, milliseconds in (*blocked, ("behind", length(rest))):
            self.spend(cause, milliseconds)


def account(life: Lifetime) -> list[tuple[Cause, int]]:
    """Return the causes of a job's lifetime and their milliseconds, in the order of `MEANINGS`.

    They are positive and add up to the lifetime even if clocks were set back: times never decrease.
    """
    sums, held, was_lost = _Account(life), life.held, False
    for run in life.runs:
        if run.queued_at is not None and run.queued_at <= run.started_at:
            sums.spend(held, sums.left_until(run.queued_at))
        sums.wait(run.started_at)
        _run(sums, run, life.ended_at, was_lost)
        is_lost = run.outcome in ("lost", "crashed")
        was_lost = was_lost or is_lost
        held = "retry_pause" if run.outcome == "retried" else "behind"
    if life.is_held:
        sums.spend(held, sums.left_until(life.ended_at))
    elif life.queued_at is not None:
        sums.spend(held, sums.left_until(life.queued_at))
    sums.wait(life.ended_at)
    return [(cause, sums.sums[cause]) for cause in MEANINGS if cause in sums.sums]


def sums_of(accounts: Sequence[JobAccount]) -> list[CauseSums]:
    """Return sums and quantiles by cause over some jobs, in the order of `MEANINGS`."""
    parts = [{part.cause: part.seconds for part in job.parts} for job in accounts]
    found = []
    for cause in MEANINGS:
        values = sorted(each.get(cause, 0.0) for each in parts)
        if any(values):
            p50, p90, p99 = (
                values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.9, 0.99)
            )
            found.append(CauseSums(cause=cause, seconds=round(sum(values), 3), p50=p50, p90=p90, p99=p99))
    return found


def _run(sums: _Account, run: Run, now: int, was_lost: bool) -> None:
    end = now if run.ended_at is None else run.ended_at
    spent = read_spent(run.spent)
    if spent:
        for letter, cause in LETTERS.items():
            part = min(spent.get(letter, 0), sums.left_until(end))
            sums.spend("repeated" if was_lost and cause == "prompt" else cause, part)
        sums.spend("commit", sums.left_until(end))
    elif run.outcome in ("lost", "crashed"):
        sums.spend("running", sums.left_until(min(end, run.saved_at or run.started_at)))
        sums.spend("repeated", sums.left_until(end))
    else:
        sums.spend("running", sums.left_until(end))


def read_spent(text: str) -> dict[str, int]:
    """Return numbers by their letters."""
    return {letter: int(number) for letter, number in _SPENT.findall(text)}


def write_spent(numbers: dict[str, int]) -> str:
    """Return the nonzero numbers after their letters, without the smallest if that is too long."""
    left = {letter: number for letter, number in numbers.items() if number > 0}
    while len(text := "".join(f"{letter}{number}" for letter, number in left.items())) > MAX_SPENT:
        del left[min(left, key=left.__getitem__)]
    return text


def without(spans: Iterable[Span], taken: Sequence[Span]) -> list[Span]:
    """Return spans without the moments of other spans."""
    left = list(spans)
    for start, stop in taken:
        pieces = []
        for a, b in left:
            pieces += [(a, min(b, start)), (max(a, stop), b)] if start < stop else [(a, b)]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def length(spans: Iterable[Span]) -> int:
    """Return the sum of the lengths of spans that do not overlap."""
    return sum(stop - start for start, stop in spans)


def why(queue: str, job_id: str) -> Call[JobAccount | None]:
    """Return a job's account; None if it is unknown."""
    return Call("why", (keys.prefix(queue),), (job_id,), lambda reply: _read(queue, job_id, reply))


def _read(queue: str, job_id: str, reply: list[Any]) -> JobAccount | None:
    if not reply:
        return None
    found = as_map(reply)
    now = int(found["now"])
    history = read_history(queue, job_id, found["job"])
    assert history is not None
    nobody, unable = _unserved(found["served"], now, has_run=bool(history.executions))
    paused, over, limited = (_spans(found[name], now) for name in ("paused", "over_quota", "rate_limited"))
    spans = (paused, nobody, unable, over, limited)
    has_twin = "twin" in as_map(as_map(found["job"])["record"])
    held: Cause = "dependency" if history.after else "equal_job" if has_twin else "delay"
    life = _lifetime(history, now, held, spans)
    parts = account(life)
    last = read_spent(life.runs[-1].spent) if life.runs else {}
    behind = _behind(found["started"], history, dict(parts).get("behind", 0) / 1000)
    return JobAccount(
        id=job_id,
        state=history.state,
        model=history.model,
        tenant=history.tenant,
        seconds=max(0, life.ended_at - life.created_at) / 1000,
        parts=tuple(Part(cause=cause, seconds=milliseconds / 1000) for cause, milliseconds in parts),
        behind=behind,
        earlier=_earlier(behind, history),
        prompt_tokens=history.progress.prompt_tokens,
        cached_tokens=last.get("c", 0) if last else None,
        decoded_beside=last.get("n", 0) / 10 if "d" in last else None,
    )


def _lifetime(job: JobHistory, now: int, held: Cause, spans: Sequence[list[Span]]) -> Lifetime:
    return Lifetime(
        created_at=_milliseconds(job.created_at) or 0,
        ended_at=_milliseconds(job.finished_at) or now,
        held=held,
        runs=tuple(_run_of(run) for run in job.executions if run.started_at is not None),
        queued_at=_milliseconds(job.queued_at),
        is_held=job.state == "delayed" or job.leader is not None,
        blocks=tuple((cause, tuple(each)) for cause, each in zip(BLOCKS, spans, strict=True)),
    )


def _run_of(execution: Execution) -> Run:
    return Run(
        _milliseconds(execution.started_at) or 0,
        _milliseconds(execution.ended_at),
        _milliseconds(execution.queued_at),
        _milliseconds(execution.saved_at),
        execution.outcome,
        execution.spent,
    )


def _unserved(served: list[Any], now: int, *, has_run: bool) -> tuple[list[Span], list[Span]]:
    """Return when no worker served the model, and when none that did knew all that the job needs."""
    if not served and has_run:
        return [], []  # its worker was never announced
    alive: list[Span] = []
    able: list[Span] = []
    for knows, seen, spells in served:
        last, until = map(int, seen.split())
        dead = _spans(spells, now) + ([(last, now)] if until < now else [])
        lives = without([(0, now)], dead)
        alive += lives
        able += lives if knows else []
    return without([(0, now)], alive), without([(0, now)], able)


def _spans(spells: list[bytes], now: int) -> list[Span]:
    """Return spells as spans; a current one ends now."""
    parts = [spell.split() for spell in spells]
    return [(int(start), now if stop == b"-" else int(stop)) for start, stop in parts]


def _behind(lanes: list[Any], job: JobHistory, seconds: float) -> tuple[Behind, ...]:
    jobs: dict[tuple[str, str], int] = {}
    for lane, number in as_map(lanes).items():
        _, priority, tenant, _ = keys.split_lane(lane) if ":" in lane else ("", "", "", "")
        jobs[tenant, priority] = jobs.get((tenant, priority), 0) + int(number)
    own = (job.tenant, job.priority)
    if job.state not in ("queued", "delayed") and own in jobs:
        jobs[own] -= 1
    total = sum(jobs.values())
    return tuple(
        Behind(tenant=tenant, priority=priority, jobs=number, seconds=round(seconds * number / total, 3))
        for (tenant, priority), number in sorted(jobs.items(), key=lambda item: -item[1])
        if number > 0
    )


def _earlier(behind: Sequence[Behind], job: JobHistory) -> tuple[Earlier, ...]:
    """Estimate from the shares of the jobs before it: without those of lower priorities, and with more workers."""
    others = (
        sum(each.seconds for each in behind if each.priority != "high") if job.priority != "high" else 0.0
    )
    shared = sum(each.seconds for each in behind) / (job.live_workers + 1) if job.live_workers else 0.0
    changes: tuple[tuple[Literal["priority high", "one more worker"], float], ...] = (
        ("priority high", others),
        ("one more worker", shared),
    )
    return tuple(
        Earlier(change=change, seconds=round(seconds, 3)) for change, seconds in changes if seconds > 0
    )


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
