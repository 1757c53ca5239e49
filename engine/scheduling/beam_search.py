"""Beam search: chooses the beams to continue, the finished ones, and when to stop.

Plain bookkeeping over the candidates that a step returns. It decides as transformers'
`generate(num_beams=...)` does for one prompt, its early-stopping heuristics included, so that the results can
be compared token by token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass

from pagemill.engine.outputs import FinishReason
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.scheduling.request import Candidates, Continuation, Request, Sequence, SequenceUpdate
from pagemill.sampling_fields import EarlyStopping


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
        """Write this hypothesis into a sequence's update."""
        sequence = update.sequence
        sequence.output_token_ids = update.new_token_ids = self.token_ids
        sequence.cumulative_logprob = self.cumulative_logprob
        sequence.finish_reason = self.finish_reason
        if self.finish_reason == "stop" and self.token_ids[-1] in sequence.request.params.stop_token_ids:
            sequence.stop_reason = self.token_ids[-1]
        if sequence.logprobs is not None:
            sequence.logprobs = update.new_logprobs = self.logprobs


class BeamSearch:
    """The search for one request.

    Args:
        width: beams kept alive, and hypotheses kept.
        max_tokens: a beam of this many tokens is finished.
        stop_token_ids: tokens that finish a beam, EOS among them.
        num_logprobs: most likely tokens to record with each chosen one.
    """

    def __init__(
        self,
        *,
        width: int,
        length_penalty: float,
        early_stopping: EarlyStopping,
        max_tokens: int,
        stop_token_ids: frozenset[int],
        num_logprobs: int = 0,
    ) -> None:
        self.width = width
        self.hypotheses: list[Hypothesis] = []
        """Best first, at most `width`."""
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._num_logprobs = num_logprobs
        # Even if all possible stop tokens rank first, `width` candidates are left to continue.
        self._num_ranked = max(2, 1 + len(stop_token_ids)) * width

    @classmethod
    def of(cls, request: Request, eos_token_ids: frozenset[int]) -> BeamSearch:
        """Create the search for a request's parameters; `max_num_tokens` is resolved."""
        params = request.params
        assert params.beam_width is not None
        eos = frozenset() if params.ignore_eos else eos_token_ids
        return cls(
            width=params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_tokens=request.max_num_tokens - len(request.prompt_token_ids),
            stop_token_ids=eos.union(params.stop_token_ids),
            num_logprobs=params.logprobs or 0,
        )

    @property
    def num_candidates(self) -> int:
        """Candidates that a step must return for each beam."""
        return max(self._num_ranked, self._num_logprobs)

    def restart(self) -> None:
        """Reset: the beams start from the prompt again."""
        self.hypotheses.clear()

    def advance(self, beams: SequenceType[tuple[Sequence, Candidates]]) -> list[Continuation]:
        """Take a step's candidates for every live beam; all beams have the same length.

        Returns:
            The continuations to keep, best first; none: the search is over, and `hypotheses` is its result.
        """
        length = len(beams[0][0].output_token_ids) + 1
        ranked = self._rank(beams)
        alive: list[Continuation] = []
        for place, continuation in enumerate(ranked):
            if length < self._max_tokens and continuation.token_id not in self._stop_token_ids:
                alive.append(continuation)
            elif place < self.width:
                # The candidates behind them only serve as a reserve when too few continue.
                self._finish(continuation, length)
        del alive[self.width :]
        return [] if self._is_over(alive, length) else alive

    def results(self, request: Request) -> list[SequenceUpdate]:
        """Make the request's first n sequences its n best hypotheses; the search is over.

        If constraints left fewer than n, the last ones are empty; if they left none, so is the list.
        """
        if not self.hypotheses:
            return []
        hypotheses = list(self.hypotheses)
        restart_beams(request)
        updates = []
        for number, sequence in enumerate(request.sequences):
            sequence.finish_reason = "stop"
            if number >= request.params.n:
                continue
            update = SequenceUpdate(sequence)
            if number < len(hypotheses):
                hypotheses[number].fill(update)
            updates.append(update)
        return updates

    def _rank(self, beams: SequenceType[tuple[Sequence, Candidates]]) -> list[Continuation]:
        best = heapq.nsmallest(
            self._num_ranked,
            (
                (-(beam.cumulative_logprob + logprob), number, token_id, logprob)
                for number, (beam, candidates) in enumerate(beams)
                for token_id, logprob in candidates[: self._num_ranked]
            ),
        )
        return [
            Continuation(
                beams[number][0],
                token_id,
                -negated,
                TokenLogprobs(token_id, logprob, beams[number][1][: self._num_logprobs]),
            )
            for negated, number, token_id, logprob in best
        ]

    def _finish(self, continuation: Continuation, length: int) -> None:
        is_stop = continuation.token_id in self._stop_token_ids
        self.hypotheses.append(
            Hypothesis(
                continuation.token_ids(),
                continuation.logprobs(),
                continuation.cumulative_logprob,
                continuation.cumulative_logprob / float(length) ** self._length_penalty,
                "stop" if is_stop else "length",
            )
        )
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _is_over(self, alive: list[Continuation], length: int) -> bool:
        if not alive:
            return True
        if len(self.hypotheses) < self.width:
            return False
        if self._early_stopping is True:
            return True
        # An upper bound on the best live beam's score: at its present length, or, if longer scores better and
        # early stopping is off, at the greatest length.
        reach = float(length)
        if self._early_stopping == "never" and self._length_penalty > 0.0:
            reach = float(self._max_tokens)
        best: float = alive[0].cumulative_logprob / reach**self._length_penalty
        return best <= self.hypotheses[-1].score


def restart_beams(request: Request) -> None:
    """Restart a search whose beams have lost their blocks from the prompt; does nothing for other requests."""
    if request.beam_search is None:
        return
    request.beam_search.restart()
    for sequence in request.sequences:
        sequence.output_token_ids, sequence.block_hashes = [], []
        sequence.cumulative_logprob = 0.0
        if sequence.logprobs is not None:
            sequence.logprobs = []
