"""What a request is for. The scheduler gives every task blocks and steps alike; a task says what ends it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample tokens after the prompt, as `SamplingParams` say."""


@dataclass(frozen=True, slots=True)
class Score:
    """Compute the log-probabilities of given continuations of the prompt. No token is sampled.

    Each continuation is a sample of the request: its tokens, their log-probabilities, finish reason `stop`. With
    `SamplingParams.logprobs` each position has that many alternatives as well.
    """

    continuations: tuple[tuple[int, ...], ...]
    """Token ids, none empty."""


Task = Generate | Score
GENERATE = Generate()
