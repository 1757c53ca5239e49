"""One sample's log-probabilities, packed: as objects they take forty times the memory."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import isfinite, nan
from typing import Any

from pagemill.engine.plan import TokenLogprobs
from pagemill.producer.wire.schema.outputs import PositionLogprobs

TokenText = Callable[[int], str]
"""Maps a token id to its text, as `TokenTexts` does."""
_CHUNK = 64
"""Positions expanded into objects at a time during writing."""


class LogprobColumns:
    """One entry per output position: the chosen token and the most likely ones, 12 bytes each."""

    def __init__(self, texts: TokenText) -> None:
        self._texts = texts
        self._ends = array("q")
        """The end of each position's entries in the columns below; the chosen token comes first."""
        self._token_ids = array("i")
        self._logprobs = array("d")
        """NaN for a forced token."""

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
        """Append positions read from a checkpoint."""
        for position in positions:
            for token in (position.chosen, *position.top):
                self._add(token.token_id, token.logprob)
            self._ends.append(len(self._token_ids))

    def positions(self, start: int = 0) -> Iterator[PositionLogprobs]:
        for row in self._rows(start):
            yield PositionLogprobs(**row)

    def json(self) -> bytes:
        """Return the JSON of `Output.logprobs`."""
        return _json_list(self._rows(0))

    def sum_of_chosen(self) -> float:
        """Return the sum of the known log-probabilities of the chosen tokens."""
        first = [0, *self._ends[:-1]]
        return (
            sum(value for index in first if isfinite(value := self._logprobs[index])) if self._ends else 0.0
        )

    def _add(self, token_id: int, logprob: float | None) -> None:
        self._token_ids.append(token_id)
        self._logprobs.append(nan if logprob is None else logprob)

    def _rows(self, start: int) -> Iterator[dict[str, Any]]:
        first = self._ends[start - 1] if 0 < start <= len(self) else 0
        for end in self._ends[start:]:
            pairs = zip(self._token_ids[first:end], self._logprobs[first:end], strict=True)
            chosen, *top = [_token(token_id, value, self._texts) for token_id, value in pairs]
            yield {"chosen": chosen, "top": top}
            first = end


def prompt_logprobs_json(
    entries: Sequence[TokenLogprobs | None], token_ids: Sequence[int], texts: TokenText
) -> bytes:
    """Return the JSON of `Result.prompt_logprobs`. `token_ids`: of the prompt, for entries without predictions."""
    known = (
        TokenLogprobs(token_ids[number], None) if entry is None else entry
        for number, entry in enumerate(entries)
    )
    return _json_list(
        {
            "chosen": _token(entry.token_id, entry.logprob, texts),
            "top": [_token(token_id, value, texts) for token_id, value in entry.top],
        }
        for entry in known
    )


def _token(token_id: int, logprob: float | None, texts: TokenText) -> dict[str, Any]:
    """Return a `TokenLogprob`; infinity becomes null, as JSON has none."""
    known = logprob is not None and isfinite(logprob)
    return {"token_id": token_id, "logprob": logprob if known else None, "text": texts(token_id)}


def _json_list(rows: Iterable[Any]) -> bytes:
    """Return a JSON list, built a few rows at a time."""
    rows, parts = iter(rows), []
    while chunk := list(islice(rows, _CHUNK)):
        parts.append(json.dumps(chunk, separators=(",", ":"), allow_nan=False)[1:-1].encode())
    return b"[" + b",".join(parts) + b"]"
