"""The rows of execution's persistent tables: their holders, and claims for sequences yet to fork."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as SequenceType

from pagemill.engine.scheduling.request import Request, Sequence


class RowTable:
    """Free rows, lowest first.

    A request whose sequences fork off one of them claims the others' rows when it is admitted. Otherwise two
    partially admitted requests would wait for each other's rows.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))
        self._freed: set[int] = set()
        """Rows left since the last plan."""
        self._claims: dict[Request, list[Sequence]] = {}
        """Request -> its sequences that do not hold a row yet."""
        self._num_claimed = 0

    @property
    def num_unclaimed(self) -> int:
        return len(self._free) - self._num_claimed

    def take(self, sequence: Sequence) -> None:
        """Give a sequence the lowest free row; the caller has checked `num_unclaimed`, or holds a claim."""
        assert sequence.row is None
        sequence.row = heapq.heappop(self._free)

    def give_back(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        heapq.heappush(self._free, sequence.row)
        self._freed.add(sequence.row)
        sequence.row = None

    def claim(self, request: Request, sequences: SequenceType[Sequence]) -> None:
        """Reserve a row for each of these sequences."""
        if sequences:
            self._claims[request] = list(sequences)
            self._num_claimed += len(sequences)

    def claimed(self, request: Request) -> SequenceType[Sequence]:
        return self._claims.get(request, ())

    def cancel_claims(self, request: Request) -> list[Sequence]:
        """Release all of a request's claims; return their sequences."""
        sequences = self._claims.pop(request, [])
        self._num_claimed -= len(sequences)
        return sequences

    def cancel_claim(self, sequence: Sequence) -> None:
        """Release the claim of an ended sequence, if it has one."""
        claims = self._claims.get(sequence.request, [])
        if sequence in claims:
            claims.remove(sequence)
            self._num_claimed -= 1

    def mark_freed(self, rows: Iterable[int], holders: Iterable[Sequence]) -> None:
        """Report to the executor (again) that these rows are free, except those with `holders`."""
        known = {sequence.row for sequence in holders if not sequence.is_row_new}
        self._freed.update(set(rows) - known)

    def take_freed(self) -> list[int]:
        """Return the rows left since the last call, for the plan under construction."""
        freed = sorted(self._freed)
        self._freed.clear()
        return freed

    def check_integrity(self, held: Iterable[int | None]) -> None:
        rows = list(held)
        every_row = sorted([*(row for row in rows if row is not None), *self._free])
        assert every_row == list(range(self.num_rows)), (rows, self._free)
        assert sum(map(len, self._claims.values())) == self._num_claimed
        assert self.num_unclaimed >= 0, "more rows are claimed than free"
        for claims in self._claims.values():
            assert all(sequence.row is None and not sequence.is_finished for sequence in claims)
