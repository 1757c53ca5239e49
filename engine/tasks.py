"""The purpose of a request. Every task gets blocks and steps alike, and defines its own end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Thinking:
    """The thinking that an output may begin with."""

    opening: str
    closing: str
    is_open: bool
    """True if the prompt ends with the opening tag."""
    opening_ids: tuple[int, ...]
    """The tags' tokens, none empty."""
    closing_ids: tuple[int, ...]
    budget: int | None = None
    """Most tokens of thinking, after which the closing tag is forced."""
    decided_by: str = ""
    """The beginning of `closing` after which the rest of it is forced, since it alone ends the reasoning. Empty:
    only all of `closing` ends it."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The part of an output that `structured_outputs` constrains: after the thinking, or from each `trigger` on.

    Without `structured_outputs` it limits the thinking alone.
    """

    thinking: Thinking | None = None
    trigger: str = ""
    """The text before each place that the structure holds for; other text is free. Empty: there is one place, and
    the structure is all that follows the thinking."""
    is_repeated: bool = False
    """True if after a triggered structure the text is free again; otherwise the output ends with it."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Sample tokens after the prompt, according to `SamplingParams`."""

    outline: Outline | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens given in addition to the prompt."""
        return 0


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


PoolingKind = Literal["embed", "classify", "rerank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Compute one row of numbers for each text. The request's prompt is the tokens of all texts, one after another.

    `embed`: a text's vector. `classify`: a number per label of a text or a pair. `rerank`: the score of a pair.
    """

    kind: PoolingKind
    lengths: tuple[int, ...]
    """Tokens per text, all positive."""
    width: int
    """Numbers of a row."""
    second_starts: tuple[int, ...] = ()
    """Per text, where the second of a pair begins: tokens from there on have type 1. Empty: all have type 0."""
    num_skipped: int = 0
    """Leading tokens of each text that are attended to, and left out of its vector."""
    dimensions: int | None = None
    """The leading numbers of each vector to keep; normalized again where the model normalizes."""
    num_tokens = 0


Task = Generate | Score | Pool
GENERATE = Generate()
