"""The verdict on a replay: what the two fingerprints promise, what was found, and whether the one honours the other."""

from __future__ import annotations

from typing import Literal

from pagemill.common.fingerprint import may_continue
from pagemill.common.sampling_fields import SAMPLING_FIELDS
from pagemill.producer.client.replay.comparison import Comparison, Exactness
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Result, WireModel

Promise = Literal["bitwise", "token", "nothing"]
"""What docs/architecture.md, "Exactness", lets expect of a replay: `bitwise` and `token` only where both results have
the same fingerprint and that tier; `nothing` otherwise."""
NEAR_TIE = 0.001
"""The tier `token` gives the same tokens unless two candidates are closer than this."""
_TIERS: tuple[Promise, ...] = ("nothing", "token", "bitwise")
_RANKS = {"neither": 0, "close": 1, "token": 1, "bitwise": 2}
KEEPS_ORDER = frozenset({
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
})  # fmt: skip
"""Sampling fields with which a greedy job still takes the candidate of the largest log-probability."""


class Verification(WireModel):
    """What `verify` found out about one job."""

    id: str
    exactness: Exactness | None = None
    """None: there is no verdict, for the `reason`."""
    promise: Promise = "nothing"
    honoured: bool | None = None
    """Whether the replay is as exact as promised. None: nothing was promised, or it is unknown (`reason`)."""
    comparison: Comparison | None = None
    reason: str | None = None
    replayed_as: str | None = None
    """The copy that ran."""
    copies: int = 0
    """Copies submitted until one ran where it was meant to."""
    model: str = ""
    seed: int | None = None
    """The seed of both, given or minted at submit."""
    fingerprint: str = ""
    replayed_fingerprint: str = ""
    tier: str = ""
    replayed_tier: str = ""

    @property
    def is_reproduced(self) -> bool:
        """True if the promise was honoured, or where nothing was promised, the tokens are the same."""
        if self.honoured is None:
            return self.exactness not in (None, "neither")
        return self.honoured


def judge(
    job: Job, stored: Result, replayed: Result, found: Comparison
) -> tuple[Promise, bool | None, str | None]:
    """Return the promise, whether it was honoured, and why that is unknown or a difference is within it."""
    promise = promised(stored, replayed)
    if promise == "nothing":
        return promise, None, None
    if _RANKS[found.exactness] >= _TIERS.index(promise):
        return promise, True, None
    difference = found.difference
    if promise == "bitwise" or difference is None or difference.what != "token":
        return promise, False, None
    if not has_plain_order(job):
        return (
            promise,
            None,
            "whether two candidates were nearly tied is unknown: log-probabilities alone do not choose",
        )
    if difference.gap is None:
        return promise, None, "whether two candidates were nearly tied is not known: they could not be scored"
    if difference.gap < NEAR_TIE:
        return (
            promise,
            True,
            f"the two candidates are nearly tied, as the tier allows: {difference.gap:.2g} apart",
        )
    return promise, False, None


def promised(stored: Result, replayed: Result) -> Promise:
    """Return how exactly a job must come out again, by fingerprints and tiers."""
    if not may_continue(stored.fingerprint, replayed.fingerprint):
        return "nothing"
    known = [_TIERS.index(tier) for tier in _TIERS if tier in (stored.tier, replayed.tier)]
    if {stored.tier, replayed.tier} - set(_TIERS):
        return "nothing"
    return _TIERS[min(known)]


def has_plain_order(job: Job) -> bool:
    """Return whether the job takes the token of the largest log-probability each time."""
    changed = {
        name
        for name in job.model_fields_set & set(SAMPLING_FIELDS)
        if getattr(job, name) != type(job).model_fields[name].get_default(call_default_factory=True)
    }
    return job.task == "generate" and job.temperature == 0.0 and not job.is_parsed and changed <= KEEPS_ORDER
