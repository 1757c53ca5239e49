"""The logical side of the KV cache: each sequence's block table, prefix hits, forks and copy-on-write.

The scheduler counts tokens; only this module maps them to blocks. Blocks can be found by their hash once the
step that fills them is planned, before it has run. In each layer every KV write precedes attention, so a
request that enters the same step can already read them, and a burst of equal cold prefixes computes the
prefix once.

Layers with windows: `BlockGroups` has the layout of tables; docs/architecture.md gives an overview.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from pagemill.engine.config import SchedulerConfig
from pagemill.engine.outputs import KVCacheStats
from pagemill.engine.scheduling.blocks import HostBlock, KVBlock
from pagemill.engine.scheduling.kv.block_groups import BlockGroups
from pagemill.engine.scheduling.kv.block_pool import NULL_BLOCK_ID, BlockPool
from pagemill.engine.scheduling.kv.group_hits import Entry, match_groups
from pagemill.engine.scheduling.kv.host_tier import HostTier
from pagemill.engine.scheduling.kv.state_cache import StateCache
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


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """The cached head of a waiting sequence's table, on the device or in the host tier."""

    entries: list[Entry] = field(default_factory=list)
    num_columns: int = 0
    """Number of columns found by hash; later entries were stored under a preempted sequence's key."""
    num_tokens: int = 0
    num_found_tokens: int = 0
    """Number of tokens of the columns found by hash, including those after the last cached recurrent state."""
    state_hash: bytes = b""
    """Key of the recurrent state after `num_tokens`."""


NO_NEW_SLOTS = AllocatedSlots()
"""The result if the table already has a free slot, as for most decodes. Never modified."""


class KVCacheManager:
    """Block tables over a `BlockPool`. Tables live in `Sequence.block_ids`; only this class changes them."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        max_host_copies: int = 2**31,
        groups: BlockGroups | None = None,
        states: StateCache | None = None,
    ) -> None:
        """`states`: the cached states of a model with recurrent layers."""
        self.groups = groups or BlockGroups(block_size)
        self.host = HostTier(num_host_blocks if enable_prefix_caching else 0, max_host_copies)
        self.states = states or StateCache(0, 0)
        self._is_recurrent = states is not None
        on_evict = self.host.store if self.host.capacity else self._drop_state if states else None
        self.pool = BlockPool(num_blocks, self.groups.num_groups, on_evict)
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
        self._host_hit_tokens = 0

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> KVCacheManager:
        return cls(
            config.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_blocks=config.num_host_blocks,
            max_host_copies=config.max_host_copies,
            groups=BlockGroups.from_config(config),
            states=StateCache(config.max_num_seqs, config.num_cached_states) if config.state_bytes else None,
        )

    def num_entries(self, num_tokens: int) -> int:
        """Return the number of entries of a table of this many tokens, including freed ones."""
        return -(-num_tokens // self.block_size) * self._num_groups

    def match_prefix(self, sequence: Sequence) -> PrefixHits:
        """Return the longest cached prefix of a sequence that does not hold blocks. Changes nothing.

        At least one token remains to be computed; otherwise there would be no logits. Columns behind a window
        are the null block. The result is valid until the next allocation.
        """
        if not self._enable_prefix_caching:
            return PrefixHits()
        hashes = self._block_hashes(sequence, sequence.num_cacheable_tokens // self.block_size)
        entries = self._match(hashes)
        if self._is_recurrent:
            return self._match_state(hashes, entries)
        num_columns = len(entries) // self._num_groups
        end = min(sequence.num_kept_tokens, sequence.num_cacheable_tokens)
        kept = range(len(entries), self.num_entries(end))
        tail = [host for index in kept if (host := self.host.lookup((sequence, index))) is not None]
        if tail and len(tail) == len(kept):
            return PrefixHits([*entries, *tail], num_columns, end)
        return PrefixHits(entries, num_columns, num_columns * self.block_size)

    def _match(self, hashes: list[bytes]) -> list[Entry]:
        if self.groups.has_windows:
            return match_groups(self._lookup, self.groups, hashes, self.pool.blocks[NULL_BLOCK_ID])
        entries = []
        for block_hash in hashes:
            entry = self._lookup(block_hash)
            if entry is None:
                break
            entries.append(entry)
        return entries

    def _match_state(self, hashes: list[bytes], entries: list[Entry]) -> PrefixHits:
        """Shorten hits to a column with a cached state at its end."""
        num_found = columns = len(entries) // self._num_groups
        while (end := self.states.num_blocks(hashes[:columns])) < columns:
            entries = self._match(hashes[:end])
            columns = len(entries) // self._num_groups
        size = self.block_size
        state_hash = hashes[columns - 1] if columns else b""
        return PrefixHits(entries, columns, columns * size, num_found * size, state_hash)

    def _lookup(self, key: bytes) -> Entry | None:
        return self.pool.lookup(key) or self.host.lookup(key)

    def num_blocks_taken(self, hits: PrefixHits, num_tokens: int) -> int:
        """Return an upper bound on the available blocks that a waiting sequence needs for `num_tokens`."""
        from_queue = sum(
            isinstance(entry, HostBlock)
            or (entry.ref_count == 0 and not entry.is_reserved and entry.block_id != NULL_BLOCK_ID)
            for entry in hits.entries
        )
        new = self.groups.columns(num_tokens) - len(hits.entries) // self._num_groups
        return sum(self.groups.most_held(window, new) for window in self.groups.windows) + from_queue

    def num_blocks_left(self, sequence: Sequence) -> int:
        """Return the blocks that a running sequence may still allocate until all of its known tokens are computed."""
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

    def can_load(self, hits: PrefixHits, step_id: int) -> bool:
        """Return whether this step can still copy these hits back from the host, if necessary, and use their state."""
        if self.states.is_computed_in(step_id, hits.state_hash):
            return False
        return self.host.has_load_capacity or not any(isinstance(entry, HostBlock) for entry in hits.entries)

    def admit(self, sequence: Sequence, hits: PrefixHits, step_id: int) -> None:
        """Give a sequence its prefix hits as the head of its table; they count as computed in step `step_id`."""
        assert not sequence.block_ids
        assert sequence.num_computed_tokens == 0
        # Existing blocks first: allocation would otherwise evict them.
        self._acquire([entry.block_id for entry in hits.entries if isinstance(entry, KVBlock)])
        self.host.use(entry for entry in hits.entries if isinstance(entry, HostBlock))
        loaded_columns: dict[int, int] = {}
        for index, entry in enumerate(hits.entries):
            if isinstance(entry, KVBlock):
                sequence.block_ids.append(entry.block_id)
                continue
            column, group = divmod(index, self._num_groups)
            block = self.pool.allocate(1, group)[0]
            loaded_columns[column] = min(self.block_size, hits.num_tokens - column * self.block_size)
            self.pool.fill(block, loaded_columns[column])
            self.host.load(entry, block.block_id)
            if isinstance(entry.key, bytes):
                self._register_block(block, entry.key, step_id)
            sequence.block_ids.append(block.block_id)
        sequence.num_computed_tokens = hits.num_tokens
        sequence.num_registered_blocks = hits.num_columns
        if self._is_recurrent:  # the prompt's last boundary, and the end of its cached prefix
            last = sequence.num_cacheable_tokens // self.block_size * self.block_size
            ends = sorted({hits.num_found_tokens, last})
            sequence.state_ends = tuple(end for end in ends if end > hits.num_tokens)
        self.drop_kept(sequence)
        self._host_hit_tokens += sum(loaded_columns.values())
        if self._enable_prefix_caching:
            self._prefix_queried_tokens += sequence.num_known_tokens
            self._prefix_hit_tokens += sequence.num_computed_tokens

    def load_state(self, sequence: Sequence, step_id: int) -> None:
        """Start an admitted sequence, which now has its row, with the state at the end of its hits."""
        if self._is_recurrent and sequence.num_computed_tokens:
            assert sequence.row is not None
            end = sequence.num_computed_tokens // self.block_size
            self.states.load(sequence.block_hashes[end - 1], sequence.row, step_id)

    def limit_chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of a running sequence's next tokens a step may compute, so that its state can be cached."""
        start = sequence.num_computed_tokens
        return min(num_tokens, next((end - start for end in sequence.state_ends if end > start), num_tokens))

    def num_blocks_needed(self, sequence: Sequence, num_new_tokens: int) -> int:
        """Return the number of blocks that `allocate_slots` would allocate from the pool."""
        start, num_held = sequence.num_computed_tokens, len(sequence.block_ids)
        needed = max(0, -(-(start + num_new_tokens) // self.block_size) * self._num_groups - num_held)
        if start // self.block_size * self._num_groups < num_held:
            needed += len(self._shared_entries(sequence))
        return needed

    def append_slot(self, sequence: Sequence) -> bool:
        """Allocate a slot for one token in a partial block, as for most decodes. If False, use `allocate_slots`."""
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
        """Allocate slots for a sequence's next tokens in step `step_id`; return None, with nothing changed, if too few
        are available.

        The first write to a partial block that a fork still shares goes to a copy.
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

        Its table keeps its length, like the table in execution, until the sequence leaves its row (`trim`).
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

        When a column becomes full, columns that no query can read any more are freed.
        """
        first = sequence.num_registered_blocks
        if sequence.num_computed_tokens // self.block_size <= first or not self._settles_blocks:
            return
        num_full = min(sequence.num_computed_tokens, sequence.num_known_tokens) // self.block_size
        if num_full <= first:
            return
        if self._enable_prefix_caching:
            self._register(sequence, first, num_full)
            if sequence.num_computed_tokens in sequence.state_ends:
                assert sequence.row is not None
                self.states.save(sequence.block_hashes[num_full - 1], sequence.row, sequence.last_step_id)
        sequence.num_registered_blocks = num_full
        if self.groups.has_windows:
            self._free_unread(sequence)

    def _register(self, sequence: Sequence, first: int, end: int) -> None:
        hashes, count = self._block_hashes(sequence, end), self._num_groups
        for index in range(first * count, end * count):
            if not (block_id := sequence.block_ids[index]):
                continue
            key = hashes[index] if count == 1 else self.groups.key(hashes[index // count], index % count)
            self._register_block(self.pool.blocks[block_id], key, sequence.last_step_id)

    def _register_block(self, block: KVBlock, key: bytes, step_id: int) -> None:
        """Make a block findable that step `step_id` fills."""
        if self.pool.register(block, key) and step_id > self.pool.retired_step_id:
            self._unproven.setdefault(step_id, []).append((block, key))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share all of its parent's blocks, including the partial last one. Both have their rows."""
        assert not child.block_ids
        self.drop_kept(child)
        self._acquire(parent.block_ids)
        child.block_ids = list(parent.block_ids)
        child.block_hashes = list(parent.block_hashes)
        child.num_registered_blocks = parent.num_registered_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        child.last_step_id = parent.last_step_id
        if self._is_recurrent:
            assert parent.row is not None
            assert child.row is not None
            self.states.fork(parent.row, child.row, parent.last_step_id)

    def shared_blocks(self, parent: Sequence, num_tokens: int) -> list[KVBlock]:
        """Return the table of a sequence's first tokens, whose last column may hold more than these."""
        return [self.pool.blocks[block_id] for block_id in parent.block_ids[: self.num_entries(num_tokens)]]

    def can_fork_at(self, parent: Sequence, num_tokens: int) -> bool:
        """Return True if a running sequence holds all blocks that a child of its first tokens will read."""
        if self._is_recurrent:
            return False  # the parent's state is that of its newest token
        columns = self.groups.columns(num_tokens)
        return all(
            parent.block_ids[column * self._num_groups + group] != NULL_BLOCK_ID
            for group, window in enumerate(self.groups.windows if self.groups.has_windows else ())
            for column in range(self.groups.first_read(window, num_tokens), columns)
        )

    def fork_at(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let a child share the blocks of its parent's first tokens; the last one is copied before it writes."""
        assert not child.block_ids
        self.drop_kept(child)
        child.block_ids = [block.block_id for block in self.shared_blocks(parent, num_tokens)]
        self._acquire(child.block_ids)
        child.num_registered_blocks = min(parent.num_registered_blocks, num_tokens // self.block_size)
        child.num_computed_tokens = num_tokens

    def preempt(self, sequence: Sequence) -> None:
        """Release a sequence's blocks. Those that are not findable by hash yet go to the host tier.

        The tier stores them under the sequence's key, so that it resumes with the same bits.
        """
        self.trim(sequence)
        if self.host.capacity:
            first = sequence.num_registered_blocks * self._num_groups
            sequence.num_kept_tokens = sequence.num_computed_tokens
            sequence.kept_entries = range(first, len(sequence.block_ids))
            for index in sequence.kept_entries:
                self.host.store((sequence, index), sequence.block_ids[index])
        self.free(sequence)

    def drop_kept(self, sequence: Sequence) -> None:
        """Discard the blocks that the host tier stores under a sequence's key."""
        for index in sequence.kept_entries:
            self.host.discard((sequence, index))
        sequence.kept_entries, sequence.num_kept_tokens = range(0), 0

    def free(self, sequence: Sequence) -> None:
        """Release a sequence's blocks, tail first; those that a step in flight references wait for it."""
        blocks = self.pool.blocks
        held = [blocks[block_id] for block_id in reversed(sequence.block_ids) if block_id]
        self.pool.release(held, sequence.last_step_id)
        sequence.block_ids = []
        sequence.num_registered_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.state_ends = ()

    def forget(self, sequence: Sequence) -> None:
        """Make none of a sequence's blocks findable: their contents are suspect."""
        for block_id in sequence.block_ids:
            self.pool.forget(self.pool.blocks[block_id])
        for block_hash in sequence.block_hashes:
            self.states.discard(block_hash)
        if self.groups.has_windows or self.host.capacity:  # blocks that it has freed may still be findable
            for _, key in self._keys(sequence, 0, len(sequence.block_hashes)):
                self.host.discard(key)
                if (block := self.pool.lookup(key)) is not None:
                    self.pool.forget(block)

    def retire(self, step_id: int) -> None:
        """Retire a step: the blocks it filled are valid, and those that waited for it are available."""
        self._unproven.pop(step_id, None)
        self.pool.retire(step_id)

    def drop_unproven(self, step_id: int) -> None:
        """Make the blocks that the failed step `step_id` or a later one should have filled unfindable."""
        self.host.drop_unproven(step_id)
        self.states.drop_unproven(step_id)
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
            host_capacity_blocks=self.host.capacity,
            host_used_blocks=self.host.num_used,
            host_stored_blocks=self.host.stored,
            host_loaded_blocks=self.host.loaded,
            host_evictions=self.host.evictions,
            host_skipped_blocks=self.host.skipped,
            host_hit_tokens=self._host_hit_tokens,
            window_frees=self._window_frees,
            cached_state_slots=self.states.num_used,
            groups=tuple(zip(self.groups.windows, pool.active_by_group, strict=True)),
        )

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check the pool, and that reference counts, fill levels and hashes follow from the tables."""
        self.pool.check_integrity()
        self.states.check_integrity()
        for block_hash in self.states.hashes():
            found = [
                self.pool.lookup(self.groups.key(block_hash, group)) for group in range(self._num_groups)
            ]
            assert None not in found, "a cached state without its block"
        references = [0] * self.pool.capacity
        filled = [0] * self.pool.capacity
        sequences = list(sequences)
        self.host.check_integrity({(s, index) for s in sequences for index in s.kept_entries})
        for sequence in sequences:
            assert not (sequence.block_ids and sequence.kept_entries), "kept blocks of a running sequence"
            assert len(sequence.block_ids) >= self.num_entries(sequence.num_computed_tokens)
            keys = dict(self._keys(sequence, 0, sequence.num_known_tokens // self.block_size))
            self._check_freed(sequence)
            for index, block_id in enumerate(sequence.block_ids):
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
        """Check that a table has all blocks that can still be read."""
        position = min(sequence.num_computed_tokens, sequence.num_known_tokens - 1)
        for group, window in enumerate(self.groups.windows):
            read = sequence.block_ids[group :: self._num_groups][self.groups.first_read(window, position) :]
            assert NULL_BLOCK_ID not in read, f"group {group} lacks what position {position} reads"

    def _drop_state(self, key: bytes, _block_id: int) -> None:
        self.states.discard(key[:_HASH_BYTES])

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
        """Return the indices of the shared entries in the column of the next write."""
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
        """Release the columns behind each group's window, from the last one back to one already released."""
        # All tokens from the last known one on may be computed again: samples are discarded and redrawn.
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
        """Yield (index in the table, key of the block) of the columns from `first` to `end`."""
        hashes = self._block_hashes(sequence, end)
        for column in range(first, end):
            for group in range(self._num_groups):
                yield column * self._num_groups + group, self.groups.key(hashes[column], group)

    def _block_hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Return the first `num_blocks` chained hashes of a sequence, extending the stored ones.

        The chain starts with the request's cache salt, so equal tokens under different salts do not match. A block
        with media also hashes their digests.
        """
        hashes = sequence.block_hashes
        if len(hashes) < num_blocks:
            size = self.block_size
            start = len(hashes) * size
            tokens = sequence.known_tokens(start, num_blocks * size)
            for offset in range(0, len(tokens), size):
                parent = hashes[-1] if hashes else _chain_root(sequence.request.cache_salt)
                content = array("q", tokens[offset : offset + size]).tobytes()
                if (media := sequence.request.media) is not None:
                    content += media.content_key(start + offset, start + offset + size)
                hashes.append(blake2b(parent + content, digest_size=_HASH_BYTES).digest())
        return hashes[:num_blocks]


def _chain_root(cache_salt: str) -> bytes:
    """Return the start of a hash chain. It is a digest, so that no salt can be crafted to continue another chain."""
    if not cache_salt:
        return b""
    return blake2b(cache_salt.encode(), digest_size=_HASH_BYTES, person=b"cache salt").digest()
