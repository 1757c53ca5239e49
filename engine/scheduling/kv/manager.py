"""The logical side of the KV cache: each sequence's block table, prefix hits, forks and copy-on-write.

The scheduler asks in tokens; only this module maps them to blocks. Blocks become findable by their hash when
the step that fills them is planned, not when it has run: in each layer every KV write precedes attention, so
a request that enters the same step may already read them, and a burst of equal cold prefixes computes the
prefix once.

Layers with windows: `BlockGroups` has the layout of tables, docs/kv-cache.md the whole of it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.outputs import KVCacheStats
from pagemill.engine.scheduling.blocks import HostBlock, KVBlock
from pagemill.engine.scheduling.kv.block_groups import BlockGroups
from pagemill.engine.scheduling.kv.block_pool import NULL_BLOCK_ID, BlockPool
from pagemill.engine.scheduling.kv.group_hits import match_groups
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
        groups: BlockGroups | None = None,
    ) -> None:
        self.groups = groups or BlockGroups(block_size)
        self.pool = BlockPool(num_blocks, self.groups.num_groups)
        self.swap_space = SwapSpace(self.pool, num_host_blocks, self.groups)
        self.block_size = block_size
        self._num_groups = self.groups.num_groups
        self._settles_blocks = enable_prefix_caching or self.groups.has_windows
        self._enable_prefix_caching = enable_prefix_caching
        self._unproven: dict[int, list[tuple[KVBlock, bytes]]] = {}
        """Step in flight -> blocks findable before that step has filled them."""
        self._allocation_failures = 0
        self._cow_copies = 0
        self._window_frees = 0
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0

    @classmethod
    def of(cls, config: SchedulerConfig) -> KVCacheManager:
        return cls(
            config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_blocks=config.num_host_blocks,
            groups=BlockGroups.of(config),
        )

    def num_entries(self, num_tokens: int) -> int:
        """Return the entries of a table of this many tokens, freed ones included."""
        return -(-num_tokens // self.block_size) * self._num_groups

    def match_prefix(self, sequence: Sequence) -> list[KVBlock]:
        """Return the table of the longest cached prefix of a sequence that holds no blocks. Changes nothing.

        At least one token is left to compute: without it there would be no logits. Columns behind a window
        are the null block. The result is valid until the next allocation.
        """
        if not self._enable_prefix_caching:
            return []
        hashes = self._block_hashes(sequence, sequence.num_cacheable_tokens // self.block_size)
        if self.groups.has_windows:
            return match_groups(self.pool, self.groups, hashes)
        hits: list[KVBlock] = []
        for block_hash in hashes:
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_hit_tokens(self, hits: list[KVBlock]) -> int:
        return len(hits) // self._num_groups * self.block_size

    def num_blocks_taken(self, hits: list[KVBlock], num_tokens: int) -> int:
        """Return the available blocks that a waiting sequence takes for `num_tokens`, at most at once."""
        from_queue = sum(
            block.ref_count == 0 and not block.is_reserved and block.block_id != NULL_BLOCK_ID
            for block in hits
        )
        new = self.groups.columns(num_tokens) - len(hits) // self._num_groups
        return sum(self.groups.most_held(window, new) for window in self.groups.windows) + from_queue

    def num_blocks_left(self, sequence: Sequence) -> int:
        """Return the blocks that a running sequence may yet take until all of its known tokens are computed."""
        groups, table = self.groups, sequence.block_ids
        columns = groups.columns(sequence.num_known_tokens)
        held = [self._num_held(table[group :: self._num_groups]) for group in range(self._num_groups)]
        new = columns - len(table) // self._num_groups
        return sum(
            max(0, new if window is None else min(new, groups.most_held(window, columns) - held[group]))
            for group, window in enumerate(groups.windows)
        )

    def num_held(self, sequence: Sequence) -> int:
        """Return the number of blocks in a sequence's table."""
        return self._num_held(sequence.block_ids)

    def _num_held(self, table: list[int]) -> int:
        return len(table) - table.count(NULL_BLOCK_ID) if self.groups.has_windows else len(table)

    def admit(self, sequence: Sequence, hits: list[KVBlock]) -> None:
        """Give a sequence its prefix hits as the head of its table; they count as computed."""
        assert not sequence.block_ids
        assert sequence.num_computed_tokens == 0
        sequence.block_ids = [block.block_id for block in hits]
        self._acquire(sequence.block_ids)
        sequence.num_computed_tokens = self.num_hit_tokens(hits)
        sequence.num_registered_blocks = sequence.num_computed_tokens // self.block_size
        if self._enable_prefix_caching:
            self._prefix_queried_tokens += sequence.num_known_tokens
            self._prefix_hit_tokens += sequence.num_computed_tokens

    def num_blocks_needed(self, sequence: Sequence, num_new_tokens: int) -> int:
        """Return the number of blocks that `allocate_slots` would take from the pool."""
        start, num_held = sequence.num_computed_tokens, len(sequence.block_ids)
        needed = max(0, -(-(start + num_new_tokens) // self.block_size) * self._num_groups - num_held)
        if start // self.block_size * self._num_groups < num_held:
            needed += len(self._shared_entries(sequence))
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
            needed += max(0, self.num_entries(start + num_new_tokens) - len(table))
            first = start // self.block_size * self._num_groups
            for entry in table[first : first + self._num_groups]:
                writers[entry] += 1
        return needed + sum(min(count, block.ref_count - 1) for block, count in writers.items())

    def append_slot(self, sequence: Sequence) -> bool:
        """Make room for one token in a block that has begun, as for most decodes. False: use `allocate_slots`."""
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        if not offset:
            return False
        if self._num_groups > 1:
            return self._append_to_column(sequence, index, offset)
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
        size, count = self.block_size, self._num_groups
        for index in range(num_tokens // size * count, self.num_entries(sequence.num_computed_tokens)):
            block = self.pool.blocks[sequence.block_ids[index]]
            self.pool.fill(block, max(0, num_tokens - index // count * size))
        sequence.num_computed_tokens = num_tokens

    def trim(self, sequence: Sequence) -> None:
        """Release the blocks after a sequence's computed tokens."""
        needed = self.num_entries(sequence.num_computed_tokens)
        spare = [self.pool.blocks[block_id] for block_id in reversed(sequence.block_ids[needed:])]
        del sequence.block_ids[needed:]
        self.pool.release(spare, sequence.last_step_id)

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Make findable the full blocks of known tokens that are computed or planned (up to `last_step_id`).

        When a column has become full, those that no query can read any more are freed.
        """
        first = sequence.num_registered_blocks
        if sequence.num_computed_tokens // self.block_size <= first or not self._settles_blocks:
            return
        if sequence.swapped_blocks:
            return
        num_full = min(sequence.num_computed_tokens, sequence.num_known_tokens) // self.block_size
        if num_full <= first:
            return
        if self._enable_prefix_caching:
            self._register(sequence, first, num_full)
        sequence.num_registered_blocks = num_full
        if self.groups.has_windows:
            self._free_unread(sequence)

    def _register(self, sequence: Sequence, first: int, end: int) -> None:
        hashes, count = self._block_hashes(sequence, end), self._num_groups
        for index in range(first * count, end * count):
            if not (block_id := sequence.block_ids[index]):
                continue
            block = self.pool.blocks[block_id]
            if block.block_hash is not None:  # in a table that was swapped in
                continue
            key = hashes[index] if count == 1 else self.groups.key(hashes[index // count], index % count)
            if self.pool.register(block, key) and sequence.last_step_id > self.pool.retired_step_id:
                self._unproven.setdefault(sequence.last_step_id, []).append((block, key))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share all of its parent's blocks, including the partial last one."""
        assert not child.block_ids
        self._acquire(parent.block_ids)
        child.block_ids = list(parent.block_ids)
        child.block_hashes = list(parent.block_hashes)
        child.num_registered_blocks = parent.num_registered_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        child.last_step_id = parent.last_step_id

    def shared_blocks(self, parent: Sequence, num_tokens: int) -> list[KVBlock]:
        """Return the table of a sequence's first tokens, whose last column may hold more than these."""
        return [self.pool.blocks[block_id] for block_id in parent.block_ids[: self.num_entries(num_tokens)]]

    def can_fork_at(self, parent: Sequence, num_tokens: int) -> bool:
        """Return True if a running sequence holds all that a child of its first tokens will read."""
        columns = self.groups.columns(num_tokens)
        return all(
            parent.block_ids[column * self._num_groups + group] != NULL_BLOCK_ID
            for group, window in enumerate(self.groups.windows if self.groups.has_windows else ())
            for column in range(self.groups.first_read(window, num_tokens), columns)
        )

    def fork_at(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a child share the blocks of its parent's first tokens; the last one is copied before it writes."""
        assert not child.block_ids
        child.block_ids = [block.block_id for block in self.shared_blocks(parent, num_tokens)]
        self._acquire(child.block_ids)
        child.num_registered_blocks = min(parent.num_registered_blocks, num_tokens // self.block_size)
        child.num_computed_tokens = num_tokens

    def free(self, sequence: Sequence) -> None:
        """Release a sequence's blocks, tail first; those that a step in flight names wait for it."""
        blocks = self.pool.blocks
        held = [blocks[block_id] for block_id in reversed(sequence.block_ids) if block_id]
        self.pool.release(held, sequence.last_step_id)
        sequence.block_ids = []
        sequence.num_registered_blocks = 0
        sequence.num_computed_tokens = 0

    def forget(self, sequence: Sequence) -> None:
        """Make none of a sequence's blocks findable: their contents are suspect."""
        for block_id in sequence.block_ids:
            self.pool.forget(self.pool.blocks[block_id])
        if self.groups.has_windows:  # what it has freed may still be findable
            for _, key in self._keys(sequence, 0, len(sequence.block_hashes)):
                if (block := self.pool.lookup(key)) is not None:
                    self.pool.forget(block)

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
            window_frees=self._window_frees,
            groups=tuple(zip(self.groups.windows, pool.active_by_group, strict=True)),
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
            assert len(sequence.block_ids or sequence.swapped_blocks) >= self.num_entries(
                sequence.num_computed_tokens
            )
            keys = dict(self._keys(sequence, 0, sequence.num_known_tokens // self.block_size))
            self._check_freed(sequence)
            for index, block_id in table:
                if not block_id:
                    continue
                references[block_id] += 1
                start = index // self._num_groups * self.block_size
                filled[block_id] = max(
                    filled[block_id], min(self.block_size, sequence.num_computed_tokens - start)
                )
                block = self.pool.blocks[block_id]
                assert block.group == index % self._num_groups, f"{block} is of group {block.group}"
                if block.block_hash is not None:
                    assert block.block_hash == keys[index], f"{block} does not hold what its hash says"
                    assert block.num_filled == self.block_size, f"{block} is hashed but not full"
        for block in self.pool.blocks:
            held, fill = references[block.block_id], filled[block.block_id]
            assert block.ref_count == held, f"{block} stands in {held} tables"
            assert not held or block.num_filled == fill, f"{block} has {block.num_filled} slots, not {fill}"
        assert all(step_id > self.pool.retired_step_id for step_id in self._unproven)

    def _check_freed(self, sequence: Sequence) -> None:
        """Check that a table has all that may yet be read."""
        position = min(sequence.num_computed_tokens, sequence.num_known_tokens - 1)
        table = sequence.block_ids or [
            entry.block_id if isinstance(entry, KVBlock) else -1 for entry in sequence.swapped_blocks
        ]
        for group, window in enumerate(self.groups.windows):
            read = table[group :: self._num_groups][self.groups.first_read(window, position) :]
            assert NULL_BLOCK_ID not in read, f"group {group} lacks what position {position} reads"

    @staticmethod
    def _kept_blocks(sequence: Sequence) -> list[tuple[int, int]]:
        """Return (index, id) of the device blocks that a swapped sequence still refers to."""
        swapped = enumerate(sequence.swapped_blocks)
        return [(index, entry.block_id) for index, entry in swapped if isinstance(entry, KVBlock)]

    def _take_blocks(self, sequence: Sequence, needed: int, step_id: int) -> AllocatedSlots:
        """Allocate blocks; a shared block that the write starts in is replaced by a copy."""
        slots, table = AllocatedSlots(), sequence.block_ids
        indices, count = self._shared_entries(sequence), self._num_groups
        if count == 1:
            taken = self.pool.allocate(needed)
        else:
            entries = [*indices, *range(len(table), len(table) + needed - len(indices))]
            taken = [self.pool.allocate(1, index % count)[0] for index in entries]
        for index in indices:
            shared, copy = self.pool.blocks[table[index]], taken.pop(0)
            slots.block_copies.append((shared.block_id, copy.block_id))
            slots.replaced_blocks.append((index, copy.block_id))
            self.pool.fill(copy, shared.num_filled)
            # The step reads it as the copy's source, so it must not be handed out before that step retires.
            self.pool.release([shared], step_id)
            table[index] = copy.block_id
            self._cow_copies += 1
        slots.new_block_ids = [block.block_id for block in taken]
        table.extend(slots.new_block_ids)
        return slots

    def _shared_entries(self, sequence: Sequence) -> list[int]:
        """Return the indices of the entries in the column of the next write that others hold as well."""
        first, table = sequence.num_computed_tokens // self.block_size * self._num_groups, sequence.block_ids
        if first >= len(table):
            return []
        blocks = self.pool.blocks
        return [i for i in range(first, first + self._num_groups) if blocks[table[i]].ref_count > 1]

    def _append_to_column(self, sequence: Sequence, index: int, offset: int) -> bool:
        pool, blocks, first = self.pool, self.pool.blocks, index * self._num_groups
        column = [blocks[block_id] for block_id in sequence.block_ids[first : first + self._num_groups]]
        for block in column:
            if block.ref_count > 1:
                return False
        for block in column:  # `pool.fill`, inlined as in `append_slot`
            pool.filled_slots += offset + 1 - block.num_filled
            block.num_filled = offset + 1
        return True

    def _acquire(self, table: list[int]) -> None:
        for block_id in table:
            if block_id:
                self.pool.acquire(self.pool.blocks[block_id])

    def _free_unread(self, sequence: Sequence) -> None:
        """Release the columns behind each group's window, from the last one to one that was released before."""
        # From the last known token on everything may be computed again: samples are discarded and redrawn.
        position = min(sequence.num_computed_tokens, sequence.num_known_tokens - 1)
        table, count = sequence.block_ids, self._num_groups
        unread = []
        for group, window in enumerate(self.groups.windows):
            index = (self.groups.first_read(window, position) - 1) * count + group
            while index >= 0 and table[index]:
                unread.append(self.pool.blocks[table[index]])
                table[index] = NULL_BLOCK_ID
                index -= count
        self.pool.release(unread, sequence.last_step_id)
        self._window_frees += len(unread)

    def _fill(self, sequence: Sequence, start: int, end: int) -> None:
        size, pool, table = self.block_size, self.pool, sequence.block_ids
        count = self._num_groups
        for index in range(start // size * count, -(-end // size) * count):
            pool.fill(pool.blocks[table[index]], min(size, end - index // count * size))

    def _keys(self, sequence: Sequence, first: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (index in the table, what finds the block) of the columns from `first` to `end`."""
        hashes = self._block_hashes(sequence, end)
        for column in range(first, end):
            for group in range(self._num_groups):
                yield column * self._num_groups + group, self.groups.key(hashes[column], group)

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
