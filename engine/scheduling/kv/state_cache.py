"""Slots for the states of recurrent layers: one per row, followed by those of cached states.

A cached state is a copy of a row's state at the end of a full block, found by that block's hash. It is dropped with
the block, or as the least recently used one.

A plan's copies run sequentially before its step computes anything: a state that step N computes is copied by
the next plan. A slot can therefore be reused in the step that releases it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StateCache:
    """Maps hashes to cached states, evicts the least recently used, and collects the copies of the next plans."""

    def __init__(self, num_rows: int, num_slots: int) -> None:
        """Create an empty cache of `num_slots`, located after the slots of the rows."""
        self.capacity = num_slots
        self._slots = range(num_rows, num_rows + num_slots)
        self._free = list(reversed(self._slots))
        self._states: dict[bytes, tuple[int, int]] = {}
        """Hash -> (slot, the step that computes the state), least recently used first."""
        self._copies: list[tuple[int, int, int]] = []
        """(source, destination, the step that computes the source; -1: already computed)."""

    @property
    def num_used(self) -> int:
        return len(self._states)

    def num_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks up to the last one with a state at its end."""
        return next((end for end in range(len(hashes), 0, -1) if hashes[end - 1] in self._states), 0)

    def is_computed_in(self, step_id: int, block_hash: bytes) -> bool:
        """Return True if a state is known and this step computes it: the next step can use it."""
        return block_hash in self._states and self._states[block_hash][1] == step_id

    def fork(self, source: int, destination: int, step_id: int) -> None:
        """Copy a row's state, as step `step_id` leaves it, to another row."""
        self._copies.append((source, destination, step_id))

    def save(self, block_hash: bytes, row: int, step_id: int) -> None:
        """Cache a row's state as step `step_id` leaves it, unless an equal one is cached."""
        if (known := self._states.pop(block_hash, None)) is None:
            if not self._free:
                self.discard(next(iter(self._states)))
            known = self._free.pop(), step_id
            self._copies.append((row, *known))
        self._states[block_hash] = known

    def load(self, block_hash: bytes, row: int, step_id: int) -> None:
        """Start step `step_id` of a row with a cached state."""
        self._states[block_hash] = slot, computed_in = self._states.pop(block_hash)
        assert computed_in < step_id, "the state is not computed yet"
        self._copies.append((slot, row, -1))

    def discard(self, block_hash: bytes) -> None:
        """Drop a state, if it is cached."""
        if (known := self._states.pop(block_hash, None)) is not None:
            self._free.append(known[0])

    def drop_unproven(self, step_id: int) -> None:
        """Drop the states that the failed step `step_id` or a later one should have copied to the cache."""
        for block_hash in [
            key for key, (_, computed_in) in self._states.items() if computed_in + 1 >= step_id
        ]:
            self.discard(block_hash)

    def take_copies(self, step_id: int) -> list[tuple[int, int]]:
        """Return the (source, destination) slots of this step's plan, in order."""
        taken = [(source, destination) for source, destination, step in self._copies if step < step_id]
        self._copies = [copy for copy in self._copies if copy[2] >= step_id]
        return taken

    def check_integrity(self) -> None:
        """Check that each slot is free or found by exactly one hash."""
        used = [slot for slot, _ in self._states.values()]
        assert sorted(used + self._free) == list(self._slots), f"{used} used and {self._free} free"

    def hashes(self) -> list[bytes]:
        """Return the hashes of all cached states. For tests and debugging."""
        return list(self._states)
