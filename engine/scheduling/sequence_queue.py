"""Sequences in scheduling order, both waiting and running."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from pagemill.engine.scheduling.request import Sequence

_Key = tuple[int, float, int, int]


def scheduling_key(sequence: Sequence) -> _Key:
    """Return priority, arrival, insertion, sample: unique, and fixed for a sequence's lifetime."""
    request = sequence.request
    return (request.priority, request.arrival, request.insertion, sequence.index)


class SequenceQueue:
    """Sequences sorted by `scheduling_key`; adding and removing is a bisection."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._keys: list[_Key] = []
        """Parallel to `_sequences`, so that a bisection computes no keys."""
        self._num_requests = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return isinstance(sequence, Sequence) and self._find(sequence) is not None

    @property
    def first(self) -> Sequence:
        return self._sequences[0]

    @property
    def last(self) -> Sequence:
        return self._sequences[-1]

    @property
    def num_requests(self) -> int:
        """Number of requests with a sequence in the queue."""
        return self._num_requests

    def add(self, sequence: Sequence) -> None:
        key = scheduling_key(sequence)
        index = bisect_left(self._keys, key)
        if not self._borders_sibling(index, sequence):
            self._num_requests += 1
        self._sequences.insert(index, sequence)
        self._keys.insert(index, key)

    def discard(self, sequence: Sequence) -> bool:
        """Remove a sequence; return False if it was not in the queue."""
        index = self._find(sequence)
        if index is None:
            return False
        del self._sequences[index], self._keys[index]
        if not self._borders_sibling(index, sequence):
            self._num_requests -= 1
        return True

    def _borders_sibling(self, index: int, sequence: Sequence) -> bool:
        """Return True if a sequence of the same request is next to the gap before `index`."""
        request, sequences = sequence.request, self._sequences
        return (index > 0 and sequences[index - 1].request is request) or (
            index < len(sequences) and sequences[index].request is request
        )

    def _find(self, sequence: Sequence) -> int | None:
        index = bisect_left(self._keys, scheduling_key(sequence))
        found = index < len(self._sequences) and self._sequences[index] is sequence
        return index if found else None
