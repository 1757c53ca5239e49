"""The requests for every engine of a table: random token ids, determined by a seed.

Random tokens make the measurement independent of the model's output. Every request generates exactly its
requested number of tokens (greedy, end-of-sequence ignored), so that all engines do the same work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

# Tokenizers have special tokens at the low end of the vocabulary; prompts avoid them.
LOWEST_TOKEN_ID = 100
RENEWAL_STEP = 211


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A length distribution: lognormal around a median, clipped."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        value = round(self.median * rng.lognormvariate(0.0, self.sigma))
        return min(max(value, self.low), self.high)


MIXED_INPUT = Lognormal(median=64, sigma=1.0, low=4, high=512)
MIXED_OUTPUT = Lognormal(median=48, sigma=1.0, low=4, high=384)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in arrival order; `prompts[i]` generates `max_tokens[i]` tokens."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(map(sum, self.sizes))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(prompt length, output length) of each request."""
        return [(len(prompt), count) for prompt, count in zip(self.prompts, self.max_tokens, strict=True)]

    def renewed(self, vocab_size: int, times: int) -> Workload:
        """Return the same lengths and the same sharing with other tokens, which no earlier pass left in a cache.

        Every token is shifted by `times` steps within the ids of prompts.
        """
        span = vocab_size - LOWEST_TOKEN_ID
        step = times * RENEWAL_STEP % span
        prompts = [
            [LOWEST_TOKEN_ID + (token - LOWEST_TOKEN_ID + step) % span for token in p] for p in self.prompts
        ]
        return Workload(self.name, prompts, self.max_tokens)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Workload:
        return cls(**data)


def chat(vocab_size: int, seed: int, share: float = 1.0) -> Workload:
    """32 requests of 64 tokens in, 128 out: decode at a steady batch size."""
    rng = random.Random(f"chat {seed}")
    count = _scaled(32, share)
    return Workload("chat", [_tokens(rng, 64, vocab_size) for _ in range(count)], [128] * count)


def mixed(vocab_size: int, seed: int, share: float = 1.0) -> Workload:
    """64 requests with lognormal lengths, for which static batches pad and wait."""
    rng = random.Random(f"mixed {seed}")
    count = _scaled(64, share)
    prompts = [_tokens(rng, MIXED_INPUT.draw(rng), vocab_size) for _ in range(count)]
    return Workload("mixed", prompts, [MIXED_OUTPUT.draw(rng) for _ in range(count)])


def label(vocab_size: int, seed: int, share: float = 1.0) -> Workload:
    """128 requests with 256 shared tokens, 32 to 48 separate ones and 4 output tokens: data-set labeling."""
    rng = random.Random(f"label {seed}")
    count = _scaled(128, share)
    shared = _tokens(rng, 256, vocab_size)
    prompts = [shared + _tokens(rng, rng.randint(32, 48), vocab_size) for _ in range(count)]
    return Workload("label", prompts, [4] * count)


WORKLOADS: dict[str, Callable[[int, int, float], Workload]] = {"chat": chat, "mixed": mixed, "label": label}


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(LOWEST_TOKEN_ID, vocab_size) for _ in range(count)]


def _scaled(count: int, share: float) -> int:
    return max(1, round(count * share))
