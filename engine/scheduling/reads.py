"""The log-probabilities that a chain of labels wants from the model, and those found so far."""

from __future__ import annotations

from collections.abc import Sequence


class Reads:
    """One read per position, beginning after the token at position `first`."""

    __slots__ = ("_next", "first", "found", "wanted")

    def __init__(self, first: int, wanted: Sequence[tuple[int, ...]]) -> None:
        """`wanted`: per position the token ids; none: nothing is read there."""
        self.first = first
        self.wanted = tuple(wanted)
        self.found: list[Sequence[float] | None] = [None if token_ids else () for token_ids in wanted]
        self._next = 0
        self._skip_found()

    @property
    def next_position(self) -> int:
        """The position after which the first missing one comes: this token must be computed."""
        return self.first + self._next

    @property
    def is_complete(self) -> bool:
        return self._next == len(self.wanted)

    def within(self, start: int, end: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return (index, token ids) of the missing reads after tokens start..end-1, indices counting from `start`."""
        first = max(start, self.next_position)
        last = min(end, self.first + len(self.wanted))
        return [
            (position - start, self.wanted[position - self.first])
            for position in range(first, last)
            if self.found[position - self.first] is None
        ]

    def record(self, position: int, values: Sequence[float]) -> None:
        """Record what comes after the token at `position`; a repetition changes nothing."""
        self.found[position - self.first] = values
        self._skip_found()

    def _skip_found(self) -> None:
        while self._next < len(self.found) and self.found[self._next] is not None:
            self._next += 1
