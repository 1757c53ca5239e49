"""The verdict on a replay: the exactness that the two fingerprints guarantee, compared with the result."""

from __future__ import annotations

from typing import Literal

from pagemill.common.fingerprint import may_continue
from pagemill.common.sampling_fields import SAMPLING_FIELDS
from pagemill.producer.client.replay.comparison import Comparison, Exactness
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Result, WireModel

Promise = Literal["bitwise", "token", "nothing"]
"""The exactness of a replay that docs/architecture.md, "Exactness", guarantees: `bitwise` and `token` only if both
results have the same fingerprint and that tier; otherwise `nothing`."""
NEAR_TIE = 0.001
"""The tier `token` guarantees the same tokens unless two candidates are closer than this."""
_TIERS: tuple[Promise, ...] = ("nothing", "token", "bitwise")
_RANKS = {"neither": 0, "close": 1, "token": 1, "bitwise": 2}
KEEPS_ORDER = frozenset({
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
})  # fmt: skip
"""Sampling fields with which a greedy job still takes the candidate with the largest log-probability."""


class Verification(WireModel):
    """The result of `verify` for one job."""

    id: str
    exactness: Exactness | None = None
    """None: there is no verdict, because of `reason`."""
    promise: Promise = "nothing"
    honoured: bool | None = None
    """True if the replay is as exact as guaranteed. None: no guarantee, or unknown (`reason`)."""
    comparison: Comparison | None = None
    reason: str | None = None
    replayed_as: str | None = None
    """The copy that ran."""
    copies: int = 0
    """Number of copies submitted until one ran on a suitable worker."""
    model: str = ""
    seed: int | None = None
    """The seed of both, set by the caller or generated at submission."""
    fingerprint: str = ""
    replayed_fingerprint: str = ""
    tier: str = ""
    replayed_tier: str = ""

    @property
    def is_reproduced(self) -> bool:
        """True if the guarantee was met, or without one, the tokens are the same."""
        if self.honoured is None:
            return self.exactness not in (None, "neither")
        return self.honoured


def judge(
    job: Job, stored: Result, replayed: Result, found: Comparison
) -> tuple[Promise, bool | None, str | None]:
    """Return the guarantee, whether it was met, and why that is unknown or why a difference is within it."""
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
    """Return the exactness that fingerprints and tiers guarantee for a replay."""
    if not may_continue(stored.fingerprint, replayed.fingerprint):
        return "nothing"
    known = [_TIERS.index(tier) for tier in _TIERS if tier in (stored.tier, replayed.tier)]
    if {stored.tier, replayed.tier} - set(_TIERS):
        return "nothing"
    return _TIERS[min(known)]


def has_plain_order(job: Job) -> bool:
    """Return whether the job always takes the token with the largest log-probability."""
    changed = {
        name
        for name in job.model_fields_set & set(SAMPLING_FIELDS)
        if getattr(job, name) != type(job).model_fields[name].get_default(call_default_factory=True)
    }
    return job.task == "generate" and job.temperature == 0.0 and not job.is_parsed and changed <= KEEPS_ORDER
