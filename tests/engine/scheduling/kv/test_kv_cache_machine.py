"""The KV cache as a state machine: random sequences start, fork, are preempted and end, next to a naive cache.

With one group of layers, and with groups whose layers have windows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagemill.engine.scheduling.blocks import KVBlock
from pagemill.engine.scheduling.kv.block_groups import BlockGroups
from pagemill.engine.scheduling.kv.manager import KVCacheManager
from pagemill.engine.scheduling.request import Sequence
from tests.engine.scheduling.harness import make_request

Windows = tuple[int | None, ...]
Key = tuple[int, tuple[int, ...]]
"""Group and prefix."""
NUM_HOST_BLOCKS, MAX_HOST_COPIES = 6, 4


class NaiveCache:
    """The same pool as plain lists and a dict of complete prefixes: obviously correct, and slow."""

    def __init__(self, num_blocks: int, block_size: int, windows: Windows) -> None:
        self.block_size, self.windows = block_size, windows
        self.free = list(range(1, num_blocks))
        self.cached: list[int] = []
        self.waiting: list[tuple[int, int]] = []
        """(step, block)"""
        self.references: Counter[int] = Counter()
        self.prefixes: dict[Key, int] = {}
        self.busy_until: dict[int, int] = {}
        self.retired = -1
        self.host: dict[Any, int | None] = {}
        """Prefixes, and entries of preempted sequences, in the host tier, least recently used first; the step
        of their copy."""
        self.in_use: set[Any] = set()
        self.num_stores = 0
        self.num_discarded = 0
        """Host blocks that are free once the next plan is made."""

    def is_read(self, column: int, group: int, position: int) -> bool:
        """Whether a query at a position, or after it, sees any of a column's tokens."""
        window = self.windows[group]
        last = (column + 1) * self.block_size - 1
        return window is None or last >= position - (window - 1 if window > 0 else position % -window)

    def find(self, key: Key) -> int | Key | None:
        return self.prefixes.get(key, key if key in self.host else None)

    def hit(self, tokens: list[int]) -> list[int | Key]:
        for columns in reversed(range((len(tokens) - 1) // self.block_size + 1)):
            table = [
                self.find((group, tuple(tokens[: (column + 1) * self.block_size])))
                if self.is_read(column, group, columns * self.block_size)
                else 0
                for column in range(columns)
                for group in range(len(self.windows))
            ]
            if None not in table:
                return [block for block in table if block is not None]
        raise AssertionError("no column at all is always a hit")

    def unread(self, table: list[int], position: int) -> list[int]:
        """The entries that no query from a position on can read, in the order in which they are released."""
        count = len(self.windows)
        return [
            index
            for group in range(count)
            for index in reversed(range(group, len(table), count))
            if table[index] and not self.is_read(index // count, group, position)
        ]

    def take(self) -> int:
        block = (self.free or self.cached).pop(0)
        for prefix, other in self.prefixes.items():
            if other == block:
                self.store(prefix)
        self.prefixes = {prefix: other for prefix, other in self.prefixes.items() if other != block}
        self.references[block] = 1
        self.busy_until[block] = -1
        return block

    def store(self, key: Any) -> None:
        if key in self.host:
            self.use(key)
            return
        if self.num_stores == MAX_HOST_COPIES:
            return
        if self.is_full:
            oldest = next(iter(self.host), None)
            if oldest is None or oldest in self.in_use:
                return
            del self.host[oldest]
        self.host[key] = None
        self.in_use.add(key)
        self.num_stores += 1

    @property
    def is_full(self) -> bool:
        return len(self.host) + self.num_discarded == NUM_HOST_BLOCKS

    def use(self, key: Any) -> None:
        self.host[key] = self.host.pop(key)
        self.in_use.add(key)

    def discard(self, keys: list[Any]) -> None:
        for key in keys:
            del self.host[key]
        self.num_discarded += len(keys)

    def discard_own(self, owner: int) -> None:
        self.discard([key for key in self.host if key[0] == owner])

    def plan(self, step: int) -> None:
        self.host = {key: step if stored is None else stored for key, stored in self.host.items()}
        self.in_use, self.num_stores, self.num_discarded = set(), 0, 0

    def hold(self, block: int) -> None:
        self.references[block] += 1
        self.cached = [other for other in self.cached if other != block]
        self.waiting = [(step, other) for step, other in self.waiting if other != block]

    def drop(self, block: int, last_step: int) -> None:
        self.references[block] -= 1
        self.busy_until[block] = max(self.busy_until[block], last_step)
        if not self.references[block]:
            if self.busy_until[block] > self.retired:
                self.waiting.append((self.busy_until[block], block))
            else:
                self.put_back(block)

    def put_back(self, block: int) -> None:
        if block in self.prefixes.values():
            self.cached.append(block)
        else:
            self.free.insert(0, block)

    def retire(self, step: int) -> None:
        self.retired = step
        for waited_for, block in sorted(self.waiting, key=lambda entry: entry[0]):
            if waited_for <= step:
                self.waiting.remove((waited_for, block))
                self.put_back(block)

    def forget(self, block: int) -> None:
        known = block in self.prefixes.values()
        self.prefixes = {prefix: other for prefix, other in self.prefixes.items() if other != block}
        if known and block in self.cached:
            self.cached.remove(block)
            self.free.insert(0, block)


class KVCacheMachine(RuleBasedStateMachine):
    """Random sequences over a small pool; after every rule the manager must agree with `NaiveCache`.

    `contents` represents execution: (token, position, group) per slot, written and copied according to the slots.
    """

    windows: Windows = (None,)
    num_blocks = 10

    def __init__(self) -> None:
        super().__init__()
        self.block_size, num_blocks = 2, self.num_blocks
        self.kv = KVCacheManager(
            num_blocks,
            self.block_size,
            num_host_blocks=NUM_HOST_BLOCKS,
            max_host_copies=MAX_HOST_COPIES,
            groups=BlockGroups(self.block_size, self.windows),
        )
        self.preempted: list[Sequence] = []
        self.host: dict[int, list[tuple[int, int, int]]] = {}
        """Contents of host blocks."""
        self.naive = NaiveCache(num_blocks, self.block_size, self.windows)
        self.sequences: list[Sequence] = []
        self.contents = {block: [(-1, -1, -1)] * self.block_size for block in range(num_blocks)}
        self.step = 0
        self.registered: list[tuple[int, int, Key]] = []
        """(step, block, group and prefix) of entries that have become findable."""

    def pick(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    @precondition(lambda self: len(self.sequences) < 6)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, prompt: list[int]) -> None:
        self.enter(make_request("r", prompt).sequences[0])

    def enter(self, sequence: Sequence) -> bool:
        """Assign the cached blocks to a sequence. False: the pool has no blocks for the content on the host."""
        tokens, count = sequence.token_ids(), len(self.windows)
        entries: list[Any] = self.naive.hit(tokens)
        num_columns, end = len(entries) // count, min(sequence.num_kept_tokens, len(tokens) - 1)
        tail = [(id(sequence), index) for index in range(len(entries), self.kv.num_entries(end))]
        if not self.naive.host.keys() >= set(tail):
            tail = []
        entries += tail
        hits = self.kv.match_prefix(sequence)
        assert [entry.block_id if isinstance(entry, KVBlock) else -1 for entry in hits.entries] == [
            entry if isinstance(entry, int) else -1 for entry in entries
        ]
        assert (hits.num_columns, hits.num_tokens) == (
            num_columns,
            end if tail else num_columns * self.block_size,
        )
        on_host = [entry for entry in entries if not isinstance(entry, int)]
        needed = len(on_host) + sum(entry in self.naive.cached for entry in entries)
        assert self.kv.num_blocks_taken(hits, hits.num_tokens) == needed
        if needed > len(self.naive.free) + len(self.naive.cached):
            return False
        for entry in entries:
            if entry and isinstance(entry, int):
                self.naive.hold(entry)
        for key in on_host:
            self.naive.use(key)
        for index, key in enumerate(entries):
            if not isinstance(key, int):
                entries[index] = self.naive.take()
                if key not in tail:
                    self.naive.prefixes[key] = entries[index]
                    self.registered.append((self.step, entries[index], key))
        self.naive.discard_own(id(sequence))
        self.kv.admit(sequence, hits, self.step)
        assert sequence.block_ids == entries
        self.copy()
        self.sequences.append(sequence)
        if on_host:
            sequence.last_step_id = self.step
        self.kv.register_full_blocks(sequence)
        self.settle(sequence, entries, num_columns, num_columns)
        return True

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 5), num_tokens=st.integers(1, 5), token=st.integers(0, 1))
    def compute(self, index: int, num_tokens: int, token: int) -> None:
        sequence = self.pick(index)
        if sequence.num_computed_tokens == sequence.num_known_tokens:
            sequence.output_token_ids.append(token)
        start = sequence.num_computed_tokens
        num_tokens = min(num_tokens, sequence.num_known_tokens - start)
        table = list(sequence.block_ids)
        available = len(self.naive.free) + len(self.naive.cached)
        needed = -(-(start + num_tokens) // self.block_size) * len(self.windows) - len(table)
        first = start // self.block_size * len(self.windows)
        column = range(first, min(first + len(self.windows), len(table)))
        shared = [index for index in column if self.naive.references[table[index]] > 1]
        slots = self.kv.allocate_slots(sequence, num_tokens, self.step)
        assert (slots is not None) == (needed + len(shared) <= available)
        if slots is None:
            return
        copies = [self.naive.take() for _ in shared]
        others = [self.naive.take() for _ in range(needed)]
        assert slots.block_copies == [(table[i], new) for i, new in zip(shared, copies, strict=True)]
        assert slots.replaced_blocks == list(zip(shared, copies, strict=True))
        self.copy()
        for index, new in zip(shared, copies, strict=True):
            self.naive.drop(table[index], self.step)
            self.contents[new] = list(self.contents[table[index]])
            table[index] = new
        assert sequence.block_ids == table + others
        self.write(sequence, start, start + num_tokens)

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        tokens, size = sequence.token_ids(), self.block_size
        table = list(sequence.block_ids)
        for position in range(start, end):
            for block, offset, _, group in self.at(table, position):
                assert self.naive.references[block] == 1, "a shared block was written"
                self.contents[block][offset] = (tokens[position], position, group)
        was_full = sequence.num_registered_blocks
        sequence.num_computed_tokens, sequence.last_step_id = end, self.step
        self.kv.register_full_blocks(sequence)
        self.settle(sequence, table, start // size, was_full)

    def settle(self, sequence: Sequence, table: list[int], first: int, was_full: int) -> None:
        """The effects of full columns: they are findable, and blocks outside their windows are released."""
        tokens, size, count = sequence.token_ids(), self.block_size, len(self.windows)
        end = sequence.num_computed_tokens
        for index in range(first * count, end // size * count):
            block, key = table[index], (index % count, tuple(tokens[: (index // count + 1) * size]))
            if block and key not in self.naive.prefixes and block not in self.naive.prefixes.values():
                self.naive.prefixes[key] = block
                self.registered.append((sequence.last_step_id, block, key))
        if end // size > was_full:
            for index in self.naive.unread(table, min(end, sequence.num_known_tokens - 1)):
                self.naive.drop(table[index], sequence.last_step_id)
                table[index] = 0
        assert sequence.block_ids == table

    @precondition(lambda self: self.sequences and len(self.sequences) < 6)
    @rule(index=st.integers(0, 5))
    def fork(self, index: int) -> None:
        parent = self.pick(index)
        child = make_request("r", parent.token_ids()).sequences[0]
        self.kv.fork(parent, child)
        for block in filter(None, parent.block_ids):
            self.naive.hold(block)
        self.sequences.append(child)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 5))
    def free(self, index: int) -> None:
        sequence = self.pick(index)
        self.sequences.remove(sequence)
        for block in filter(None, reversed(sequence.block_ids)):
            self.naive.drop(block, sequence.last_step_id)
        self.kv.free(sequence)

    @precondition(lambda self: any(s.block_ids for s in self.sequences) and len(self.preempted) < 6)
    @rule(index=st.integers(0, 5))
    def preempt(self, index: int) -> None:
        holders = [sequence for sequence in self.sequences if sequence.block_ids]
        sequence = holders[index % len(holders)]
        self.sequences.remove(sequence)
        self.preempted.append(sequence)
        for entry in range(sequence.num_registered_blocks * len(self.windows), len(sequence.block_ids)):
            self.naive.store((id(sequence), entry))
        for block in filter(None, reversed(sequence.block_ids)):
            self.naive.drop(block, sequence.last_step_id)
        self.kv.preempt(sequence)
        self.copy()

    @precondition(lambda self: self.preempted and len(self.sequences) < 6)
    @rule(index=st.integers(0, 5))
    def resume(self, index: int) -> None:
        sequence = self.preempted[index % len(self.preempted)]
        if sequence.num_kept_tokens == sequence.num_known_tokens:
            sequence.output_token_ids.append(0)  # as sampled before it was preempted
        if self.enter(sequence):
            self.preempted.remove(sequence)

    @precondition(lambda self: len(self.sequences) < 6 and any(s.block_ids for s in self.sequences))
    @rule(index=st.integers(0, 5))
    def preempt_and_resume(self, index: int) -> None:
        """A sequence of events that is rare at random."""
        self.preempt(index)
        self.launch()
        self.resume(len(self.preempted) - 1)

    @precondition(lambda self: self.preempted)
    @rule(index=st.integers(0, 5))
    def end_preempted(self, index: int) -> None:
        sequence = self.preempted.pop(index % len(self.preempted))
        self.naive.discard_own(id(sequence))
        self.kv.drop_kept(sequence)

    def copy(self) -> None:
        """Execute the copies of the next plan, in its order."""
        self.naive.plan(self.step)
        stores, loads = self.kv.host.take_copies(self.step)
        assert len(stores) <= MAX_HOST_COPIES
        for block, host in stores:
            self.host[host] = list(self.contents[block])
        for host, block in loads:
            self.contents[block] = list(self.host[host])

    @rule()
    def launch(self) -> None:
        self.step += 1

    @precondition(lambda self: self.naive.retired < self.step - 1)
    @rule()
    def retire(self) -> None:
        self.kv.retire(self.naive.retired + 1)
        self.naive.retire(self.naive.retired + 1)

    @precondition(lambda self: self.naive.retired < self.step - 1)
    @rule()
    def fail(self) -> None:
        """The oldest step in flight raises: it and all later ones are void, and so are their sequences."""
        failed = self.naive.retired + 1
        self.kv.drop_unproven(failed)
        for step, block, key in self.registered:
            if step >= failed and self.naive.prefixes.get(key) == block:
                self.naive.forget(block)
        for sequence in [s for s in self.sequences if s.last_step_id >= failed]:
            self.free(self.sequences.index(sequence))
        self.naive.discard(
            [key for key, step in self.naive.host.items() if step is not None and step >= failed]
        )
        self.step += 1
        for step in range(failed, self.step):
            self.kv.retire(step)
            self.naive.retire(step)

    @invariant()
    def agrees_with_the_naive_cache(self) -> None:
        self.kv.check_integrity(self.sequences + self.preempted)
        queue = [block.block_id for block in self.kv.pool.free_queue()]
        assert queue == self.naive.free + self.naive.cached
        stats = self.kv.stats()
        assert stats.free_blocks == len(self.naive.free)
        assert stats.cached_blocks == len(self.naive.cached)
        assert stats.active_blocks == sum(count > 0 for count in self.naive.references.values())
        assert stats.reserved_blocks == 1 + len(self.naive.waiting)
        used = {(block, offset) for s in self.sequences for block, offset, _, _ in self.slots(s)}
        assert stats.host_used_blocks == len(self.naive.host)
        assert stats.filled_slots == len(used)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence in self.sequences:
            tokens, size = sequence.token_ids(), self.block_size
            read = set()
            for block, offset, position, group in self.slots(sequence):
                assert self.contents[block][offset] == (tokens[position], position, group)
                read.add((position, group))
            next_query = min(sequence.num_computed_tokens, sequence.num_known_tokens - 1)
            for position in range(sequence.num_computed_tokens):
                for group in range(len(self.windows)):
                    is_read = self.naive.is_read(position // size, group, next_query)
                    assert (position, group) in read or not is_read, "a window's block is gone"

    @invariant()
    def findable_blocks_hold_what_they_are_found_for(self) -> None:
        for (group, prefix), block in self.naive.prefixes.items():
            start = len(prefix) - self.block_size
            expected = [(token, start + place, group) for place, token in enumerate(prefix[start:])]
            assert self.contents[block] == expected

    def at(self, table: list[int], position: int) -> list[tuple[int, int, int, int]]:
        """(block, offset, position, group) of a position in every group that has not released it."""
        column, offset = divmod(position, self.block_size)
        blocks = table[column * len(self.windows) : (column + 1) * len(self.windows)]
        return [(block, offset, position, group) for group, block in enumerate(blocks) if block]

    def slots(self, sequence: Sequence) -> list[tuple[int, int, int, int]]:
        positions = range(sequence.num_computed_tokens)
        return [slot for position in positions for slot in self.at(sequence.block_ids, position)]


class OneWindowMachine(KVCacheMachine):
    windows = (3,)


class TwoGroupsMachine(KVCacheMachine):
    windows, num_blocks = (None, -4), 19


class ThreeGroupsMachine(KVCacheMachine):
    windows, num_blocks = (2, None, -5), 25


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestOneWindow, TestTwoGroups, TestThreeGroups = (
    machine.TestCase for machine in (OneWindowMachine, TwoGroupsMachine, ThreeGroupsMachine)
)
TestOneWindow.settings = TestTwoGroups.settings = TestThreeGroups.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None
)
