"""The log-probabilities of one sample, packed: objects would take forty times the memory, for as long as a job runs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pydantic import TypeAdapter

from pagemill.engine.plan import TokenLogprobs
from pagemill.producer.wire.schema.outputs import PositionLogprobs, TokenLogprob

_CHUNK = 64
"""Positions that are objects at a time while they are written."""
_positions = TypeAdapter(tuple[PositionLogprobs | None, ...])


class LogprobColumns:
    """One entry per output position: the chosen token and the most likely ones, 12 bytes each."""

    def __init__(self) -> None:
        self._ends = array("q")
        """Where a position's entries end in the columns below; its chosen token comes first."""
        self._token_ids = array("i")
        self._logprobs = array("d")
        """NaN for a token that was forced."""

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def num_entries(self) -> int:
        """Tokens with a log-probability, over all positions."""
        return len(self._token_ids)

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            self._add(entry.token_id, entry.logprob)
            for token_id, logprob in entry.top:
                self._add(token_id, logprob)
            self._ends.append(len(self._token_ids))

    def extend_saved(self, positions: Iterable[PositionLogprobs]) -> None:
        """The same from a checkpoint."""
        for position in positions:
            for token in (position.chosen, *position.top):
                self._add(token.token_id, token.logprob)
            self._ends.append(len(self._token_ids))

    def positions(self, start: int = 0, end: int | None = None) -> Iterator[PositionLogprobs]:
        for number in range(start, len(self) if end is None else end):
            first = self._ends[number - 1] if number else 0
            chosen, *top = (self._token(at) for at in range(first, self._ends[number]))
            yield PositionLogprobs(chosen=chosen, top=tuple(top))

    def json(self) -> bytes:
        """As `Output.logprobs` is written."""
        return logprobs_json(self.positions())

    def _add(self, token_id: int, logprob: float | None) -> None:
        self._token_ids.append(token_id)
        self._logprobs.append(math.nan if logprob is None else logprob)

    def _token(self, at: int) -> TokenLogprob:
        logprob = self._logprobs[at]
        return TokenLogprob(token_id=self._token_ids[at], logprob=None if math.isnan(logprob) else logprob)


def logprobs_json(positions: Iterable[PositionLogprobs | None]) -> bytes:
    """A JSON list of positions, made a few at a time."""
    rows = iter(positions)
    parts = []
    while chunk := tuple(islice(rows, _CHUNK)):
        parts.append(_positions.dump_json(chunk)[1:-1])
    return b"[" + b",".join(parts) + b"]"


def wire_logprobs(entry: TokenLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=TokenLogprob(token_id=entry.token_id, logprob=entry.logprob),
        top=tuple(TokenLogprob(token_id=token_id, logprob=value) for token_id, value in entry.top),
    )


def prompt_logprobs_json(entries: Sequence[TokenLogprobs | None]) -> bytes:
    """As `Result.prompt_logprobs` is written."""
    return logprobs_json(None if entry is None else wire_logprobs(entry) for entry in entries)
