"""Sequences with given tokens that sample none: their log-probability reads, and their completion."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceType
from dataclasses import replace
from typing import Any

from pagemill.engine.plan import RowWork, TokenLogprobs
from pagemill.engine.scheduling.label_tree import LabelTree
from pagemill.engine.scheduling.request import Ends, Request, Sequence, SequenceUpdate


class Scores:
    """The log-probabilities of a continuation's tokens. A `Score` task."""

    def __init__(self, sequence: Sequence, continuation: SequenceType[int]) -> None:
        sequence.continuation, sequence.output_token_ids = tuple(continuation), list(continuation[:-1])
        self.num_scored = len(continuation)
        self._sequence = sequence
        self._start = sequence.num_prompt_tokens
        self._found: list[TokenLogprobs] = []

    @property
    def is_complete(self) -> bool:
        return len(self._found) == self.num_scored

    @property
    def num_cacheable_tokens(self) -> int:
        return self._start + len(self._found) - 1

    def request(self, work: RowWork) -> None:
        if work.start + work.num_tokens >= self._start:
            work.num_prompt_logprobs = self._sequence.request.params.logprobs
            work.scored_from = self._start

    def take(self, work: RowWork, found: list[TokenLogprobs]) -> Ends | None:
        first = work.first_scored - self._start
        self._found[first : first + len(found)] = found
        if not self.is_complete:
            return None
        self._sequence.finish_reason = "stop"
        return [self._sequence], [
            SequenceUpdate(self._sequence, list(self._sequence.continuation), self._found)
        ]


class Reads:
    """The log-probabilities that a chain of a label tree reads: one read per position, after that token."""

    num_scored = 0

    def __init__(self, sequence: Sequence, first: int, wanted: SequenceType[tuple[int, ...]]) -> None:
        """`wanted`: the token ids per position, starting at `first`; none: nothing is read there."""
        self._sequence = sequence
        self._first = first
        self._wanted = wanted
        self.found: list[SequenceType[float] | None] = [None if token_ids else () for token_ids in wanted]
        self._next = 0
        self._skip_found()

    @property
    def is_complete(self) -> bool:
        return self._next == len(self._wanted)

    @property
    def num_cacheable_tokens(self) -> int:
        """The position of the first missing read: the token there must be computed."""
        return self._first + self._next

    def request(self, work: RowWork) -> None:
        first = max(work.start, self.num_cacheable_tokens)
        last = min(work.start + work.num_tokens, self._first + len(self._wanted))
        work.reads = [
            (position - work.start, self._wanted[position - self._first])
            for position in range(first, last)
            if self.found[position - self._first] is None
        ]

    def take(self, work: RowWork, found: list[list[float]]) -> Ends | None:
        """Record the log-probabilities of a step. The last read of all chains ends the request."""
        request, was_complete = self._sequence.request, self.is_complete
        for (index, _), values in zip(work.reads, found, strict=True):
            self.found[work.start + index - self._first] = values
        self._skip_found()
        if self.is_complete and not was_complete:
            request.num_open_chains -= 1
        if not request.num_open_chains:
            return request.live_sequences, [_finish_labels(request)]
        return ([self._sequence], []) if self.is_complete and self._sequence.row is None else None

    def _skip_found(self) -> None:
        while self._next < len(self.found) and self.found[self._next] is not None:
            self._next += 1


def start_labels(request: Request, tree: LabelTree) -> None:
    """Replace a request's only sequence by the chains of a tree; its first remains the reported one."""
    start = len(request.prompt_token_ids)
    request.params = replace(request.params, max_tokens=tree.longest)
    request.labels, request.num_open_chains = tree, len(tree.chains)
    request.sequences += [Sequence(request, number) for number in range(1, len(tree.chains))]
    for sequence, chain in zip(request.sequences, tree.chains, strict=True):
        sequence.continuation, sequence.output_token_ids = chain.token_ids, list(chain.token_ids[:-1])
        sequence.scoring = Reads(sequence, start + chain.first_read - 1, chain.reads)
        if chain.parent is not None:
            sequence.fork_of = request.sequences[chain.parent]
            sequence.fork_at = start + chain.num_shared


def drop_chains(request: Request) -> Sequence:
    """Drop the given tokens of the chains, and return the reported sequence."""
    request.num_open_chains = 0
    for sequence in request.sequences:
        sequence.continuation, sequence.output_token_ids = (), []
    return request.sequences[0]


def has_nan(found: Iterable[Any]) -> bool:
    """Return True if one of the log-probabilities of given tokens is not a number."""
    return any(
        math.isnan(value)
        for each in found
        for value in (each if isinstance(each, list) else [each.logprob or 0.0])
    )


def _finish_labels(request: Request) -> SequenceUpdate:
    assert request.labels is not None
    found = [
        [list(values or ()) for values in chain.scoring.found]
        for chain in request.sequences
        if isinstance(chain.scoring, Reads)
    ]
    scores = request.labels.scores(found)
    first = drop_chains(request)
    first.output_token_ids = list(request.labels.labels[scores.chosen])
    first.finish_reason = "stop"
    return SequenceUpdate(first, list(first.output_token_ids), label_scores=scores)
