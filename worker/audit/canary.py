"""Canaries: short prompts, the same on every worker, and the comparison of two workers' outputs."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from pagemill.engine.outputs import RequestOutput
from pagemill.engine.parts import Tier
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from pagemill.worker.engine_host.messages import AddRequest

NUM_PROMPTS = 2
PROMPT_TOKENS = 24
OUTPUT_TOKENS = 12
IDLE_PRIORITY = 1 << 20
"""After every job. If jobs are always waiting, a request with this priority never runs."""
BOUNDS: dict[Tier, float] = {"bitwise": 0.0, "token": 0.001, "continues": 0.1}
"""Maximum mean difference of two workers' log-probabilities that counts as agreement; see docs/audit.md."""
TIE = 4.0
"""Maximum distance of two candidates, as a multiple of the mean difference, if two workers choose differently."""
_VOCABULARY = 512
"""Ids are below it, since all models have tokens there: special tokens, bytes and short words."""


@dataclass(slots=True)
class Canary:
    """One prompt, and the output that an engine has computed for it so far."""

    request: AddRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)
    """For each output token, the best alternative and how much less likely it is."""
    prompt_logprobs: list[float] = field(default_factory=list)
    error: str | None = None
    is_over: bool = False

    def apply(self, output: RequestOutput) -> None:
        """Add an output of the engine."""
        for delta in output.deltas:
            self.token_ids += delta.token_ids
            self.logprobs += [_number(one.logprob) for one in delta.logprobs or ()]
            self.seconds += [_second(one) for one in delta.logprobs or ()]
        if output.finished:
            given = output.prompt_logprobs or ()
            self.prompt_logprobs = [_number(one.logprob) for one in given if one is not None]
            self.error = output.error or (None if self.token_ids else "it has no output")
            self.is_over = True


def canaries(number: int, vocab_size: int, priority: int = IDLE_PRIORITY) -> list[Canary]:
    """Return the canaries of a worker's audit, by its number. They never use the prefix cache."""
    params = SamplingParams(
        max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=0, seed=0
    )
    size = min(vocab_size, _VOCABULARY)
    return [
        Canary(
            AddRequest(
                request_id=f"canary:{number}:{index}",
                prompt_token_ids=[
                    (7 + index * 13 + position * 37) % size for position in range(PROMPT_TOKENS)
                ],
                params=params,
                priority=priority,
                cache_salt=f"canary:{number}",
            )
        )
        for index in range(NUM_PROMPTS)
    ]


def answer_of(asked: Sequence[Canary], tier: Tier) -> str:
    """Return the result of the canaries: a digest of every bit, or values to compare if bits may differ."""
    if tier == "bitwise":
        digest = hashlib.sha256()
        for one in asked:
            numbers = [*one.prompt_logprobs, *one.logprobs]
            digest.update(json.dumps(one.token_ids).encode())
            digest.update(struct.pack(f"<{len(numbers)}d", *numbers))
        return digest.hexdigest()[:32]
    rows = [
        (
            one.token_ids,
            [round(number, 5) for number in (*one.prompt_logprobs, *one.logprobs)],
            [(token_id, round(gap, 5)) for token_id, gap in one.seconds],
        )
        for one in asked
    ]
    return json.dumps(rows, separators=(",", ":"))


def difference(own: str, other: str) -> float:
    """Return the mean difference between the log-probabilities of two answers.

    Prompts count fully, and outputs up to the first token that differs, since later tokens have different
    prefixes. Infinite if one has NaN, or if a differing token is not a near tie on both sides.
    """
    gaps: list[float] = []
    ties = [0.0]
    for mine, theirs in zip(json.loads(own), json.loads(other), strict=True):
        (tokens, numbers, seconds), (other_tokens, other_numbers, other_seconds) = mine, theirs
        pairs = list(zip(tokens, other_tokens, strict=True))
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if same < len(pairs):
            choices = ((seconds[same], other_tokens[same]), (other_seconds[same], tokens[same]))
            ties += [gap / TIE if token_id == wanted else math.inf for (token_id, gap), wanted in choices]
        count = len(numbers) - len(tokens) + same
        gaps += [abs(a - b) for a, b in zip(numbers[:count], other_numbers[:count], strict=True)]
    mean = sum(gaps) / len(gaps) if gaps else math.inf
    return max(mean, *ties) if math.isfinite(mean) else math.inf


def matching(own: str, answers: Sequence[str], tier: Tier) -> str:
    """Return the answer that agrees best with a worker's own, or its own if there is none."""
    if tier == "bitwise" or own in answers or not answers:
        return own
    gaps = [difference(own, answer) for answer in answers]
    nearest = min(range(len(gaps)), key=gaps.__getitem__)
    return answers[nearest] if gaps[nearest] <= BOUNDS[tier] else own


def _number(logprob: float | None) -> float:
    return math.nan if logprob is None else logprob


def _second(chosen: TokenLogprobs) -> tuple[int, float]:
    others = [(token_id, logprob) for token_id, logprob in chosen.top if token_id != chosen.token_id]
    if not others:
        return -1, math.inf
    return others[0][0], abs(_number(chosen.logprob) - others[0][1])
