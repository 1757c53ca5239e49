"""The purpose of a request. Every task gets blocks and steps alike, and defines its own end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample tokens after the prompt, according to `SamplingParams`."""

    num_tokens = 0
    """Tokens given beside the prompt."""


@dataclass(frozen=True, slots=True)
class Score:
    """Compute the log-probabilities of given continuations of the prompt. No token is sampled.

    Each continuation is a sample of the request: its tokens, their log-probabilities, finish reason `stop`.
    With `SamplingParams.logprobs` each position also has that many alternatives.
    """

    continuations: tuple[tuple[int, ...], ...]
    """Token ids, none empty."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all continuations."""
        return sum(map(len, self.continuations))


Task = Generate | Score
GENERATE = Generate()
