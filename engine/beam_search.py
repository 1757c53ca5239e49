"""Beam search: chooses the beams to continue, the finished ones, and when to stop.

Its beams are sequences that the scheduler holds once it has their candidates; the search forks, extends and ends them.
It decides as transformers' `generate(num_beams=...)` does for one prompt, its early-stopping heuristics included, so
that the results can be compared token by token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field, replace

from pagemill.engine.outputs import FinishReason
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.scheduling.request import Candidates, Request, Sequence, SequenceUpdate
from pagemill.engine.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class Beam:
    """A live beam: a sequence, its logprobs so far, and its candidates once a step has returned them."""

    sequence: Sequence
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    candidates: Candidates | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam and one more token."""

    beam: Beam
    token_id: int
    cumulative_logprob: float
    entry: TokenLogprobs

    def extended(self, sequence: Sequence) -> Beam:
        return Beam(sequence, self.cumulative_logprob, [*self.beam.logprobs, self.entry])


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    cumulative_logprob: float
    score: float
    """`cumulative_logprob` / length ** length_penalty, by which hypotheses are ranked."""
    finish_reason: FinishReason

    def fill(self, update: SequenceUpdate) -> None:
        """Write this hypothesis into a sequence and its update."""
        sequence, params = update.sequence, update.sequence.request.params
        sequence.output_token_ids = update.new_token_ids = self.token_ids
        sequence.finish_reason = self.finish_reason
        update.cumulative_logprob = self.cumulative_logprob
        if self.finish_reason == "stop" and self.token_ids[-1] in params.stop_token_ids:
            sequence.stop_reason = self.token_ids[-1]
        if params.logprobs is not None:
            update.new_logprobs = self.logprobs


class BeamSearch:
    """The search for one request.

    Args:
        request: its sequences are the beams: their number limits both live beams and stored hypotheses.
        stop_token_ids: tokens that finish a beam, EOS among them.
    """

    def __init__(self, request: Request, stop_token_ids: frozenset[int]) -> None:
        self.request = request
        self.beams = [Beam(sequence) for sequence in request.sequences]
        self.hypotheses: list[Hypothesis] = []
        """Best first, up to the width of the search."""
        self._width = len(request.sequences)
        self._stop_token_ids = stop_token_ids
        # Even if a beam's stop tokens all rank first, it has enough candidates to be continued by every beam.
        request.num_candidates = max(self._width + max(1, len(stop_token_ids)), request.params.logprobs or 0)

    @property
    def _max_tokens(self) -> int:
        """Number of tokens at which a beam is finished."""
        return self.request.max_num_tokens - len(self.request.prompt_token_ids)

    def advance(self) -> list[Continuation]:
        """Process the candidates of all beams, which have the same length.

        Returns:
            The continuations to keep, best first. If empty, the search has finished, and `hypotheses` is its result.
        """
        length = len(self.beams[0].sequence.output_token_ids) + 1
        alive: list[Continuation] = []
        # Before the first token all beams are the same.
        for place, continuation in enumerate(self._rank(self.beams if length > 1 else self.beams[:1])):
            if place >= self._width and (len(alive) == self._width or length == self._max_tokens):
                break
            if length < self._max_tokens and continuation.token_id not in self._stop_token_ids:
                alive.append(continuation)
            elif place < self._width:
                # The candidates behind them only serve as a reserve when too few continue.
                self._finish(continuation, length)
        if length == 1:
            alive = [replace(each, beam=beam) for each, beam in zip(alive, self.beams, strict=False)]
        return [] if self._is_over(alive, length) else alive

    def _rank(self, beams: SequenceType[Beam]) -> Iterator[Continuation]:
        """Yield the candidates of all beams, best first."""
        ranked = heapq.merge(
            *(
                sorted(
                    (-(beam.cumulative_logprob + logprob), number, token_id, logprob)
                    for token_id, logprob in beam.candidates or ()
                )
                for number, beam in enumerate(beams)
            )
        )
        num_logprobs = self.request.params.logprobs or 0
        for negated, number, token_id, logprob in ranked:
            yield Continuation(
                beams[number],
                token_id,
                -negated,
                TokenLogprobs(token_id, logprob, (beams[number].candidates or [])[:num_logprobs]),
            )

    def _finish(self, continuation: Continuation, length: int) -> None:
        is_stop = continuation.token_id in self._stop_token_ids
        self.hypotheses.append(
            Hypothesis(
                [*continuation.beam.sequence.output_token_ids, continuation.token_id],
                [*continuation.beam.logprobs, continuation.entry],
                continuation.cumulative_logprob,
                continuation.cumulative_logprob / float(length) ** self.request.params.length_penalty,
                "stop" if is_stop else "length",
            )
        )
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self._width :]

    def _is_over(self, alive: list[Continuation], length: int) -> bool:
        params = self.request.params
        if not alive:
            return True
        if len(self.hypotheses) < self._width:
            return False
        if params.early_stopping is True:
            return True
        # An upper bound on the best live beam's score: at its present length, or, if longer scores better and
        # early stopping is off, at the greatest length.
        reach = float(length)
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            reach = float(self._max_tokens)
        best: float = alive[0].cumulative_logprob / reach**params.length_penalty
        return best <= self.hypotheses[-1].score


class BeamSearches:
    """Drives the searches of a scheduler's requests: between two steps, by the candidates of the step before."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: Iterable[int]) -> None:
        self._scheduler = scheduler
        self._eos_token_ids = frozenset(eos_token_ids)
        self._searches: dict[Request, BeamSearch] = {}

    def add(self, request: Request) -> None:
        """Convert a request into a search, if it requests one, before the scheduler receives it."""
        params = request.params
        if params.beam_width is not None:
            eos = frozenset() if params.ignore_eos else self._eos_token_ids
            self._searches[request] = BeamSearch(request, eos.union(params.stop_token_ids))

    def discard(self, request: Request) -> None:
        """Discard a request that ended before its first step."""
        self._searches.pop(request, None)

    def drive(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Continue or end the searches that these updates concern; returns the updates for the caller."""
        if not self._searches:
            return updates
        reported = [update for update in updates if update.sequence.request not in self._searches]
        by_request: dict[Request, list[SequenceUpdate]] = {}
        for update in updates:
            if update.sequence.request in self._searches:
                by_request.setdefault(update.sequence.request, []).append(update)
        for request, own in by_request.items():
            reported += self._drive(self._searches[request], own)
        return reported

    def _drive(self, search: BeamSearch, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        request = search.request
        if request.is_finished:  # its beams were never output
            return self._end(search, updates[0])
        candidates = {update.sequence: update.candidates for update in updates}
        for beam in search.beams:
            beam.candidates = candidates.get(beam.sequence) or beam.candidates
        if not all(beam.sequence.is_held for beam in search.beams):
            return [update for update in updates if update.candidates is None]
        continuations = search.advance()
        if continuations:
            self._branch(search, continuations)
            return [SequenceUpdate(search.beams[0].sequence)]
        if not search.hypotheses:
            return self._end(search, self._scheduler.fail_without_choice(request)[0])
        for sequence in request.live_sequences:
            self._scheduler.finish_sequence(sequence, "stop")
        return self._end(search)

    def _branch(self, search: BeamSearch, continuations: list[Continuation]) -> None:
        """Extend each beam by its first continuation, and end those without one; other continuations replace them."""
        children: dict[Sequence, list[Continuation]] = {}
        for continuation in continuations:
            children.setdefault(continuation.beam.sequence, []).append(continuation)
        for sequence in search.request.live_sequences:
            if sequence not in children:
                self._scheduler.finish_sequence(sequence, "stop")
        free = iter([sequence for sequence in search.request.sequences if sequence.is_finished])
        beams = []
        for parent, (first, *others) in children.items():
            for continuation in others:
                child = self._scheduler.fork(parent, next(free))
                self._scheduler.extend(child, continuation.token_id)
                beams.append(continuation.extended(child))
            self._scheduler.extend(parent, first.token_id)
            beams.append(first.extended(parent))
        search.beams = sorted(beams, key=lambda beam: beam.sequence.index)

    def _end(self, search: BeamSearch, failure: SequenceUpdate | None = None) -> list[SequenceUpdate]:
        """Write the n best hypotheses to the request's first n sequences; leave those without one empty."""
        request = search.request
        del self._searches[request]
        reason: FinishReason = "stop"
        updates = [SequenceUpdate(sequence) for sequence in request.sequences]
        if failure is not None:
            reason = failure.sequence.finish_reason or "error"
            updates = [replace(failure, sequence=sequence) for sequence in request.sequences]
        for sequence in request.sequences:
            sequence.output_token_ids, sequence.finish_reason = [], reason
        del updates[request.params.n :]
        for update, hypothesis in zip(updates, search.hypotheses if failure is None else (), strict=False):
            hypothesis.fill(update)
        return updates
