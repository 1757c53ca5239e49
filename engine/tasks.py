"""The purpose of a request. All tasks use blocks and steps in the same way, and each defines its completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Thinking:
    """The reasoning that may start an output."""

    opening: str
    closing: str
    is_open: bool
    """True if the prompt ends with the opening tag."""
    opening_ids: tuple[int, ...]
    """The tags' tokens, none empty."""
    closing_ids: tuple[int, ...]
    budget: int | None = None
    """Maximum number of reasoning tokens, after which the closing tag is forced."""
    decided_by: str = ""
    """The prefix of `closing` after which the rest of it is forced, since the prefix alone ends the reasoning. Empty:
    only all of `closing` ends it."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The part of an output that `structured_outputs` constrains: after the reasoning, or from each `trigger` on.

    Without `structured_outputs` it only limits the reasoning.
    """

    thinking: Thinking | None = None
    trigger: str = ""
    """The text before each structured part; other text is free. Empty: there is one structured part, which is all
    text after the reasoning."""
    is_repeated: bool = False
    """True if the text after a triggered structure is free again; otherwise the output ends with it."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample tokens after the prompt, according to `SamplingParams`."""

    outline: Outline | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens given in addition to the prompt."""
        return 0


@dataclass(frozen=True, slots=True)
class Score:
    """Compute the log-probabilities of given continuations of the prompt. No token is sampled.

    Each continuation is a sample of the request: its tokens, their log-probabilities, finish reason `stop`.
    With `SamplingParams.logprobs`, each position also has this number of alternatives.
    """

    continuations: tuple[tuple[int, ...], ...]
    """Token ids, none empty."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all continuations."""
        return sum(map(len, self.continuations))


PoolingKind = Literal["embed", "classify", "rerank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Compute one result row for each text. The request's prompt is the concatenated tokens of all texts.

    `embed`: a text's vector. `classify`: a number per label of a text or a pair. `rerank`: the score of a pair.
    """

    kind: PoolingKind
    lengths: tuple[int, ...]
    """Tokens per text, all positive."""
    width: int
    """Number of values in a row."""
    second_starts: tuple[int, ...] = ()
    """Per text, the start of a pair's second text: tokens from there on have type 1. Empty: all have type 0."""
    num_skipped: int = 0
    """Leading tokens of each text that are attended to, but excluded from its vector."""
    dimensions: int | None = None
    """Number of leading values of each vector to keep; normalized again if the model normalizes."""
    num_tokens = 0


Task = Generate | Score | Pool
GENERATE = Generate()
