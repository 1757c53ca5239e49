"""The logical side of the KV cache: each sequence's block table, prefix hits, forks and copy-on-write.

The scheduler asks in tokens; only this module maps them to blocks. Blocks become findable by their hash when
the step that fills them is planned, not when it has run: in each layer every KV write precedes attention, so
a request that enters the same step may already read them, and a burst of equal cold prefixes computes the
prefix once.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from pagemill.engine.outputs import KVCacheStats
from pagemill.engine.scheduling.blocks import HostBlock, KVBlock
from pagemill.engine.scheduling.kv.block_pool import BlockPool
from pagemill.engine.scheduling.kv.swap_space import SwapSpace
from pagemill.engine.scheduling.request import Sequence

_HASH_BYTES = 16
"""128 bits: a collision of two prefixes is less likely than a memory error."""


@dataclass(slots=True)
class AllocatedSlots:
    """The effects of an allocation that execution must apply."""

    new_block_ids: list[int] = field(default_factory=list)
    """Appended to the sequence's table."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) ids to copy before the step writes anything."""
    replaced_blocks: list[tuple[int, int]] = field(default_factory=list)
    """(index in the table, new id): entries replaced by copy-on-write."""


NO_NEW_SLOTS = AllocatedSlots()
"""The result if the table already has room, as for most decodes. Never modified."""


class KVCacheManager:
    """Block tables over a `BlockPool`. Tables live in `Sequence.block_ids`; only this class changes them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.swap_space = SwapSpace(self.pool, num_host_blocks, block_size)
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._unproven: dict[int, list[tuple[KVBlock, bytes]]] = {}
        """Step in flight -> blocks findable before that step has filled them."""
        self._allocation_failures = 0
        self._cow_copies = 0
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, sequence: Sequence) -> list[KVBlock]:
        """Return the longest cached prefix of a sequence that holds no blocks. Changes nothing.

        At least one token is left to compute: without it there would be no logits. The result is valid until
        the next allocation.
        """
        if not self._enable_prefix_caching:
            return []
        hits: list[KVBlock] = []
        for block_hash in self._block_hashes(sequence, sequence.num_cacheable_tokens // self.block_size):
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_blocks_taken(self, hits: list[KVBlock], num_tokens: int) -> int:
        """Return the available blocks that a waiting sequence takes for `num_tokens`."""
        from_queue = sum(block.ref_count == 0 and not block.is_reserved for block in hits)
        return self.blocks_for(num_tokens) - len(hits) + from_queue

    def admit(self, sequence: Sequence, hits: list[KVBlock]) -> None:
        """Give a sequence its prefix hits as the head of its table; they count as computed."""
        assert not sequence.block_ids
        assert sequence.num_computed_tokens == 0
        for block in hits:
            self.pool.acquire(block)
        sequence.block_ids = [block.block_id for block in hits]
        sequence.num_registered_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self.block_size
        if self._enable_prefix_caching:
            self._prefix_queried_tokens += sequence.num_known_tokens
            self._prefix_hit_tokens += sequence.num_computed_tokens

    def num_blocks_needed(self, sequence: Sequence, num_new_tokens: int) -> int:
        """Return the number of blocks that `allocate_slots` would take from the pool."""
        start, table = sequence.num_computed_tokens, sequence.block_ids
        needed = max(0, -(-(start + num_new_tokens) // self.block_size) - len(table))
        index = start // self.block_size
        if index < len(table) and self.pool.blocks[table[index]].ref_count > 1:
            needed += 1
        return needed

    def num_blocks_needed_together(self, work: Iterable[tuple[Sequence, int]]) -> int:
        """Return the number of blocks that these (sequence, new tokens) need in total, swapped ones once they
        are back.

        Of the sequences that write into one shared block, the last holder writes in place.
        """
        needed = 0
        writers: Counter[KVBlock | HostBlock] = Counter()
        for sequence, num_new_tokens in work:
            start = sequence.num_computed_tokens
            table: list[KVBlock | HostBlock] = [self.pool.blocks[block_id] for block_id in sequence.block_ids]
            if sequence.swapped_blocks:
                table = sequence.swapped_blocks
                start = min(start, sequence.num_known_tokens - 1)  # as `swap_in` leaves it
            needed += max(0, self.blocks_for(start + num_new_tokens) - len(table))
            index = start // self.block_size
            if index < len(table):
                writers[table[index]] += 1
        return needed + sum(min(count, block.ref_count - 1) for block, count in writers.items())

    def append_slot(self, sequence: Sequence) -> bool:
        """Make room for one token in a block that has begun, as for most decodes. False: use `allocate_slots`."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if not offset:
            return False
        pool = self.pool
        block = pool.blocks[sequence.block_ids[index]]
        if block.ref_count > 1:
            return False
        # `pool.fill`, inlined: at a thousand rows the call is a tenth of planning a step.
        pool.filled_slots += offset + 1 - block.num_filled
        block.num_filled = offset + 1
        return True

    def allocate_slots(self, sequence: Sequence, num_new_tokens: int, step_id: int) -> AllocatedSlots | None:
        """Make room for a sequence's next tokens in step `step_id`; None, with nothing changed, if there is
        none now.

        The first write into a partial block that a fork still shares goes to a copy of it.
        """
        start = sequence.num_computed_tokens
        needed = self.num_blocks_needed(sequence, num_new_tokens)
        if needed > self.pool.num_available:
            self._allocation_failures += 1
            return None
        slots = self._take_blocks(sequence, needed, step_id) if needed else NO_NEW_SLOTS
        self._fill(sequence, start, start + num_new_tokens)
        return slots

    def roll_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Keep only a sequence's first computed tokens; those after them were drafts that were not sampled.

        Its table keeps its length, as execution's does, until the sequence leaves its row (`trim`).
        """
        size = self.block_size
        for index in range(num_tokens // size, self.blocks_for(sequence.num_computed_tokens)):
            block = self.pool.blocks[sequence.block_ids[index]]
            self.pool.fill(block, max(0, num_tokens - index * size))
        sequence.num_computed_tokens = num_tokens

    def trim(self, sequence: Sequence) -> None:
        """Release the blocks after a sequence's computed tokens."""
        needed = self.blocks_for(sequence.num_computed_tokens)
        spare = [self.pool.blocks[block_id] for block_id in reversed(sequence.block_ids[needed:])]
        del sequence.block_ids[needed:]
        self.pool.release(spare, sequence.last_step_id)

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Make findable the full blocks of known tokens that are computed or planned (up to `last_step_id`)."""
        first = sequence.num_registered_blocks
        if sequence.num_computed_tokens // self.block_size <= first or not self._enable_prefix_caching:
            return
        if sequence.swapped_blocks:
            return
        num_full = min(sequence.num_computed_tokens, sequence.num_known_tokens) // self.block_size
        hashes = self._block_hashes(sequence, num_full)
        for index in range(first, num_full):
            block = self.pool.blocks[sequence.block_ids[index]]
            # A table that was swapped in has blocks that never lost their hash.
            registered = block.block_hash is None and self.pool.register(block, hashes[index])
            if registered and sequence.last_step_id > self.pool.retired_step_id:
                self._unproven.setdefault(sequence.last_step_id, []).append((block, hashes[index]))
        sequence.num_registered_blocks = num_full

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share all of its parent's blocks, including the partial last one."""
        assert not child.block_ids
        for block_id in parent.block_ids:
            self.pool.acquire(self.pool.blocks[block_id])
        child.block_ids = list(parent.block_ids)
        child.block_hashes = list(parent.block_hashes)
        child.num_registered_blocks = parent.num_registered_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        child.last_step_id = parent.last_step_id

    def shared_blocks(self, parent: Sequence, num_tokens: int) -> list[KVBlock]:
        """Return the blocks of a sequence's first tokens, of which the last may hold more than these."""
        return [self.pool.blocks[block_id] for block_id in parent.block_ids[: self.blocks_for(num_tokens)]]

    def fork_at(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a child share the blocks of its parent's first tokens; the last one is copied before it writes."""
        assert not child.block_ids
        blocks = self.shared_blocks(parent, num_tokens)
        for block in blocks:
            self.pool.acquire(block)
        child.block_ids = [block.block_id for block in blocks]
        child.num_registered_blocks = min(parent.num_registered_blocks, num_tokens // self.block_size)
        child.num_computed_tokens = num_tokens

    def free(self, sequence: Sequence) -> None:
        """Release a sequence's blocks, tail first; those that a step in flight names wait for it."""
        blocks = self.pool.blocks
        self.pool.release(
            [blocks[block_id] for block_id in reversed(sequence.block_ids)], sequence.last_step_id
        )
        sequence.block_ids = []
        sequence.num_registered_blocks = 0
        sequence.num_computed_tokens = 0

    def forget(self, sequence: Sequence) -> None:
        """Make none of a sequence's blocks findable: their contents are suspect."""
        for block_id in sequence.block_ids:
            self.pool.forget(self.pool.blocks[block_id])

    def retire(self, step_id: int) -> None:
        """Retire a step: the blocks it filled are proven, those that waited for it are available."""
        self._unproven.pop(step_id, None)
        self.pool.retire(step_id)

    def drop_unproven(self, step_id: int) -> None:
        """Step `step_id` failed: make blocks that it or a later step was to fill unfindable."""
        for unproven_id in [s for s in self._unproven if s >= step_id]:
            for block, block_hash in self._unproven.pop(unproven_id):
                if block.block_hash == block_hash:
                    self.pool.forget(block)

    def stats(self) -> KVCacheStats:
        pool = self.pool
        return KVCacheStats(
            capacity_blocks=pool.capacity,
            block_size=self.block_size,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            active_blocks=pool.num_active,
            reserved_blocks=pool.num_reserved,
            shared_blocks=pool.num_shared,
            block_references=pool.num_references,
            filled_slots=pool.filled_slots,
            allocations=pool.allocations,
            frees=pool.frees,
            evictions=pool.evictions,
            allocation_failures=self._allocation_failures,
            cow_copies=self._cow_copies,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            swapped_out_blocks=self.swap_space.swapped_out,
            swapped_in_blocks=self.swap_space.swapped_in,
            host_capacity_blocks=self.swap_space.capacity,
            host_used_blocks=self.swap_space.num_used,
        )

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check the pool, and that reference counts, fill levels and hashes follow from the tables."""
        self.pool.check_integrity()
        references = [0] * self.pool.capacity
        filled = [0] * self.pool.capacity
        sequences = list(sequences)
        self.swap_space.check_integrity([sequence for sequence in sequences if sequence.swapped_blocks])
        for sequence in sequences:
            table = [*enumerate(sequence.block_ids), *self._kept_blocks(sequence)]
            assert len(sequence.block_ids or sequence.swapped_blocks) >= self.blocks_for(
                sequence.num_computed_tokens
            )
            hashes = self._block_hashes(sequence, sequence.num_known_tokens // self.block_size)
            for index, block_id in table:
                references[block_id] += 1
                in_block = min(self.block_size, sequence.num_computed_tokens - index * self.block_size)
                filled[block_id] = max(filled[block_id], in_block)
                block = self.pool.blocks[block_id]
                if block.block_hash is not None:
                    assert block.block_hash == hashes[index], f"{block} does not hold what its hash says"
                    assert block.num_filled == self.block_size, f"{block} is hashed but not full"
        for block in self.pool.blocks:
            held, fill = references[block.block_id], filled[block.block_id]
            assert block.ref_count == held, f"{block} stands in {held} tables"
            assert not held or block.num_filled == fill, f"{block} has {block.num_filled} slots, not {fill}"
        assert all(step_id > self.pool.retired_step_id for step_id in self._unproven)

    @staticmethod
    def _kept_blocks(sequence: Sequence) -> list[tuple[int, int]]:
        """Return (index, id) of the device blocks that a swapped sequence still refers to."""
        swapped = enumerate(sequence.swapped_blocks)
        return [(index, entry.block_id) for index, entry in swapped if isinstance(entry, KVBlock)]

    def _take_blocks(self, sequence: Sequence, needed: int, step_id: int) -> AllocatedSlots:
        """Allocate blocks; a shared block that the write starts in is replaced by a copy."""
        slots = AllocatedSlots()
        taken = self.pool.allocate(needed)
        index = sequence.num_computed_tokens // self.block_size
        shared = self.pool.blocks[sequence.block_ids[index]] if index < len(sequence.block_ids) else None
        if shared is not None and shared.ref_count > 1:
            copy = taken.pop(0)
            slots.block_copies.append((shared.block_id, copy.block_id))
            slots.replaced_blocks.append((index, copy.block_id))
            self.pool.fill(copy, shared.num_filled)
            # The step reads it as the copy's source, so it must not be handed out before that step retires.
            self.pool.release([shared], step_id)
            sequence.block_ids[index] = copy.block_id
            self._cow_copies += 1
        slots.new_block_ids = [block.block_id for block in taken]
        sequence.block_ids.extend(slots.new_block_ids)
        return slots

    def _fill(self, sequence: Sequence, start: int, end: int) -> None:
        size, pool, table = self.block_size, self.pool, sequence.block_ids
        for index in range(start // size, -(-end // size)):
            pool.fill(pool.blocks[table[index]], min(size, end - index * size))

    def _block_hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Return the first `num_blocks` chained hashes of a sequence, extending the stored ones.

        The chain begins with the request's cache salt, so equal tokens under different salts do not match.
        """
        hashes = sequence.block_hashes
        if len(hashes) < num_blocks:
            size = self.block_size
            start = len(hashes) * size
            tokens = sequence.known_tokens(start, num_blocks * size)
            for offset in range(0, len(tokens), size):
                parent = hashes[-1] if hashes else _chain_root(sequence.request.cache_salt)
                content = array("q", tokens[offset : offset + size]).tobytes()
                hashes.append(blake2b(parent + content, digest_size=_HASH_BYTES).digest())
        return hashes[:num_blocks]


def _chain_root(cache_salt: str) -> bytes:
    """Return the start of a hash chain. A digest, so that no salt can be made to continue another chain."""
    if not cache_salt:
        return b""
    return blake2b(cache_salt.encode(), digest_size=_HASH_BYTES, person=b"cache salt").digest()
