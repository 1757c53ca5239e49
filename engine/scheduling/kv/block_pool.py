"""The physical side of the KV cache: ownership of block ids. It handles blocks, not sequences or tokens.

Every block is in exactly one state:

  free      no reference, no hash: in the free queue, at its front
  cached    no reference, but hashed: in the free queue, reusable by a prefix hit until it is evicted
  active    at least one reference
  reserved  the null block, and blocks without a reference that a step in flight still uses

The free queue is the LRU list: free blocks first, then cached ones, least recently used first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pagemill.engine.scheduling.blocks import KVBlock
from pagemill.engine.scheduling.kv.residency import BlockResidency

NULL_BLOCK_ID = 0
"""Padding in block tables. Never allocated."""


class FreeBlockQueue:
    """A doubly linked list through the blocks themselves: O(1) at both ends and from the middle.

    A deque is not enough: a prefix hit takes its block out of the middle.
    """

    def __init__(self) -> None:
        self._head = KVBlock(-1)
        self._tail = KVBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVBlock]:
        """Iterate from the front, the next to be allocated, to the back."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: KVBlock) -> None:
        before = self._tail.prev_free
        assert before is not None
        self._insert(before, block, self._tail)

    def prepend(self, block: KVBlock) -> None:
        after = self._head.next_free
        assert after is not None
        self._insert(self._head, block, after)

    def popleft(self) -> KVBlock:
        block = self._head.next_free
        assert block is not None
        assert block is not self._tail, "the free queue is empty"
        self.remove(block)
        return block

    def remove(self, block: KVBlock) -> None:
        before, after = block.prev_free, block.next_free
        assert before is not None, f"{block} is not in the free queue"
        assert after is not None, f"{block} is not in the free queue"
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self._length -= 1

    def _insert(self, before: KVBlock, block: KVBlock, after: KVBlock) -> None:
        assert block.prev_free is None, f"{block} is in the free queue already"
        before.next_free, block.prev_free = block, before
        after.prev_free, block.next_free = block, after
        self._length += 1


class BlockPool:
    """Hands out blocks, counts references, finds full blocks by hash, evicts the least recently used.

    Steps retire in order (`retire`). A block whose last reference is dropped while a step that names it is in
    flight is reserved until that step retires: execution may still read it.
    """

    def __init__(
        self, num_blocks: int, num_groups: int = 1, on_evict: Callable[[bytes, int], None] | None = None
    ) -> None:
        """Create a pool of free blocks.

        Args:
            on_evict: called with the hash and the id of each block that is evicted.
        """
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self.retired_step_id = -1
        self.num_cached = 0
        self.num_active = 0
        self.active_by_group = [0] * num_groups
        self.num_shared = 0
        self.num_references = 0
        self.filled_slots = 0
        """Slots in use in active blocks; a shared block counts once."""
        self.allocations = 0
        self.frees = 0
        self.evictions = 0
        self.residency = BlockResidency()
        self._queue = FreeBlockQueue()
        self._by_hash: dict[bytes, KVBlock] = {}
        self._deferred: dict[int, dict[KVBlock, None]] = {}
        """Step in flight -> blocks that become available when it retires, in order of release."""
        self._num_deferred = 0
        self._on_evict = on_evict
        for block in self.blocks[1:]:
            self._queue.append(block)

    @property
    def capacity(self) -> int:
        return len(self.blocks)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now, including cached ones."""
        return len(self._queue)

    @property
    def num_free(self) -> int:
        return len(self._queue) - self.num_cached

    @property
    def num_deferred(self) -> int:
        """Blocks that become available when the steps in flight retire."""
        return self._num_deferred

    @property
    def num_reserved(self) -> int:
        return self._num_deferred + 1

    def allocate(self, num_blocks: int, group: int = 0) -> list[KVBlock]:
        """Take blocks for a group with one reference each; the caller must have checked `num_available`."""
        assert num_blocks <= len(self._queue), f"{num_blocks} blocks wanted, {len(self._queue)} available"
        taken = [self._queue.popleft() for _ in range(num_blocks)]
        for block in taken:
            if block.block_hash is not None:
                del self._by_hash[block.block_hash]
                if self._on_evict is not None:
                    self._on_evict(block.block_hash, block.block_id)
                block.block_hash = None
                self.num_cached -= 1
                self.evictions += 1
            block.ref_count = 1
            block.group = group
            block.num_filled = 0
            if BlockResidency.is_sampled(block.block_id):
                self.residency.allocated(block.block_id)
            block.last_step_id = -1
        self.num_active += num_blocks
        self.active_by_group[group] += num_blocks
        self.num_references += num_blocks
        self.allocations += num_blocks
        return taken

    def acquire(self, block: KVBlock) -> None:
        """Add a reference: a prefix hit (the block may be cached or reserved) or a fork."""
        if block.ref_count == 0:
            assert block.block_hash is not None, f"{block} holds nothing to share"
            if block.is_reserved:
                block.is_reserved = False
                self._num_deferred -= 1
                del self._deferred[block.last_step_id][block]
            else:
                self._queue.remove(block)
                self.num_cached -= 1
            self.num_active += 1
            self.active_by_group[block.group] += 1
            self.filled_slots += block.num_filled
            if BlockResidency.is_sampled(block.block_id):
                self.residency.reused(block.block_id)
        elif block.ref_count == 1:
            self.num_shared += 1
        block.ref_count += 1
        self.num_references += 1

    def release(self, blocks: Iterable[KVBlock], last_step_id: int) -> None:
        """Drop one reference of each; `last_step_id` is the newest step that uses them for this holder.

        Pass a table back to front: blocks released first are evicted first, and a prefix without its tail is
        worth more than a tail without its prefix.
        """
        for block in blocks:
            assert block.ref_count > 0, f"{block} has no reference to drop"
            block.ref_count -= 1
            self.num_references -= 1
            if last_step_id > block.last_step_id:
                block.last_step_id = last_step_id
            if block.ref_count == 1:
                self.num_shared -= 1
            elif block.ref_count == 0:
                self.num_active -= 1
                self.active_by_group[block.group] -= 1
                self.filled_slots -= block.num_filled
                self.frees += 1
                if BlockResidency.is_sampled(block.block_id):
                    self.residency.released(block.block_id, is_cached=block.block_hash is not None)
                if block.last_step_id > self.retired_step_id:
                    self._defer(block)
                else:
                    self._enqueue(block)

    def retire(self, step_id: int) -> None:
        """Make available the blocks that waited for steps up to this one, which have run."""
        self.retired_step_id = max(self.retired_step_id, step_id)
        for waited_for in sorted(s for s in self._deferred if s <= step_id):
            for block in self._deferred.pop(waited_for):
                block.is_reserved = False
                self._num_deferred -= 1
                self._enqueue(block)

    def lookup(self, block_hash: bytes) -> KVBlock | None:
        return self._by_hash.get(block_hash)

    def register(self, block: KVBlock, block_hash: bytes) -> bool:
        """Make a full block findable. False if an equal one already is: that one stays."""
        assert block.ref_count > 0, f"{block} has no owner"
        assert block.block_hash is None, f"{block} is registered already"
        if self._by_hash.setdefault(block_hash, block) is not block:
            return False
        block.block_hash = block_hash
        return True

    def forget(self, block: KVBlock) -> None:
        """Drop a block's hash, if any, so that its contents can't be found again."""
        if block.block_hash is None:
            return
        del self._by_hash[block.block_hash]
        block.block_hash = None
        if block.ref_count == 0:
            self.residency.forgotten(block.block_id)
        if block.ref_count == 0 and not block.is_reserved:
            self.num_cached -= 1
            self._queue.remove(block)
            self._queue.prepend(block)

    def fill(self, block: KVBlock, num_filled: int) -> None:
        """Record that an active block's first `num_filled` slots are in use."""
        self.filled_slots += num_filled - block.num_filled
        block.num_filled = num_filled

    def states(self) -> bytes:
        """Return the blocks' states by id, as letters of `pagemill.engine.outputs.BlockMap`.

        Reads the complete pool.
        """
        return "".join(
            ("s" if block.ref_count > 1 else "a")
            if block.ref_count
            else (
                "r" if block.is_reserved or not block.block_id else "f" if block.block_hash is None else "c"
            )
            for block in self.blocks
        ).encode()

    def free_queue(self) -> list[KVBlock]:
        """Return the blocks in allocation order. For tests and debugging."""
        return list(self._queue)

    def check_integrity(self) -> None:
        """Recompute every count and link from the blocks. Raises AssertionError with the numbers."""
        queue = list(self._queue)
        assert len(queue) == len(self._queue), f"{len(queue)} blocks linked, {len(self._queue)} counted"
        queued = {block.block_id for block in queue}
        assert len(queued) == len(queue)
        assert NULL_BLOCK_ID not in queued
        deferred = {block.block_id for block in self.blocks if block.is_reserved}
        listed = {block.block_id for blocks in self._deferred.values() for block in blocks}
        assert len(deferred) == self._num_deferred, f"{deferred} wait, {self._num_deferred} counted"
        assert deferred == listed, f"{deferred ^ listed} wait for a step, or seem to"
        active = [block for block in self.blocks if block.ref_count > 0]
        assert not queued & deferred
        assert not (queued | deferred) & {block.block_id for block in active}
        is_cached = [block.block_hash is not None for block in queue]
        assert sum(is_cached) == self.num_cached, f"{sum(is_cached)} cached, {self.num_cached} counted"
        assert is_cached == sorted(is_cached), "a cached block would be evicted before a free one is used"
        states = (self.num_free, self.num_cached, self.num_active, self.num_reserved)
        assert sum(states) == self.capacity, f"free, cached, active, reserved = {states} of {self.capacity}"
        assert len(active) == self.num_active, f"{len(active)} active blocks, {self.num_active} counted"
        by_group = [
            sum(block.group == group for block in active) for group in range(len(self.active_by_group))
        ]
        assert by_group == self.active_by_group, f"{by_group} active by group, {self.active_by_group} counted"
        assert self.blocks[NULL_BLOCK_ID].ref_count == 0
        assert self.blocks[NULL_BLOCK_ID].block_hash is None
        assert sum(block.ref_count for block in active) == self.num_references
        assert sum(block.ref_count > 1 for block in active) == self.num_shared
        assert sum(block.num_filled for block in active) == self.filled_slots
        assert all(step_id > self.retired_step_id for step_id in self._deferred)
        with_hash = {block.block_hash: block for block in self.blocks if block.block_hash is not None}
        assert with_hash == self._by_hash, "the hash table and the blocks' hashes differ"

    def _defer(self, block: KVBlock) -> None:
        block.is_reserved = True
        self._num_deferred += 1
        self._deferred.setdefault(block.last_step_id, {})[block] = None

    def _enqueue(self, block: KVBlock) -> None:
        if block.block_hash is None:
            self._queue.prepend(block)
        else:
            self._queue.append(block)
            self.num_cached += 1
