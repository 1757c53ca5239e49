"""Block tables: prefix hits, forks, copy-on-write, and the state machine that compares them with a naive cache."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.kv_cache_manager import AllocatedSlots, KVCacheManager
from engine.scheduling.request import Sequence
from tests.engine.scheduler_harness import make_request


def compute(kv: KVCacheManager, sequence: Sequence, num_tokens: int, step_id: int = 0) -> AllocatedSlots:
    """Plan a sequence's next tokens as the scheduler does."""
    slots = kv.allocate_slots(sequence, num_tokens, step_id)
    assert slots is not None
    sequence.num_computed_tokens += num_tokens
    sequence.last_step_id = step_id
    kv.register_full_blocks(sequence)
    return slots


def admit(kv: KVCacheManager, prompt: list[int]) -> Sequence:
    sequence = make_request("r", prompt).sequences[0]
    kv.admit(sequence, kv.match_prefix(sequence))
    return sequence


def test_copy_on_write_as_the_paged_attention_article_tells_it() -> None:
    # "The future of artificial intelligence is": 7 tokens, in blocks of 4, sampled twice.
    kv = KVCacheManager(num_blocks=8, block_size=4)
    request = make_request("r", range(7), n=2)
    a, b = request.sequences
    compute(kv, a, 7)
    kv.fork(a, b)
    assert a.block_ids == b.block_ids == [1, 2]
    assert [kv.pool.blocks[block_id].ref_count for block_id in (1, 2)] == [2, 2]
    stats = kv.stats()
    assert (stats.active_blocks, stats.shared_blocks, stats.block_references) == (2, 2, 4)
    assert stats.filled_slots == 7
    kv.retire(0)

    # A writes its first token into the partial block: it gets a copy, and B is the block's only holder.
    a.output_token_ids.append(100)
    slots = compute(kv, a, 1, step_id=1)
    assert slots == AllocatedSlots(new_block_ids=[], block_copies=[(2, 3)], replaced_blocks=[(1, 3)])
    assert (a.block_ids, b.block_ids) == ([1, 3], [1, 2])
    assert kv.pool.blocks[2].ref_count == 1
    assert kv.pool.blocks[1].ref_count == 2

    # B now writes in place.
    b.output_token_ids.append(200)
    assert compute(kv, b, 1, step_id=1) == AllocatedSlots()
    stats = kv.stats()
    assert (stats.cow_copies, stats.active_blocks, stats.shared_blocks, stats.filled_slots) == (1, 3, 1, 12)
    kv.check_integrity([a, b])

    # The source of the copy belongs to the step until it retires.
    kv.free(b)
    assert kv.stats().reserved_blocks == 2
    kv.retire(1)
    assert kv.stats().reserved_blocks == 1
    kv.check_integrity([a, b])


def test_a_full_last_block_is_shared_without_a_copy() -> None:
    kv = KVCacheManager(num_blocks=8, block_size=4)
    a, b = make_request("r", range(8), n=2).sequences
    compute(kv, a, 8)
    kv.fork(a, b)
    a.output_token_ids.append(100)
    assert compute(kv, a, 1) == AllocatedSlots(new_block_ids=[3])
    assert (a.block_ids, b.block_ids) == ([1, 2, 3], [1, 2])


def test_a_prefix_is_found_while_the_step_that_computes_it_is_being_planned() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    first = admit(kv, [*range(10), 50])
    compute(kv, first, 11)
    second = admit(kv, [*range(10), 60])
    assert second.block_ids == first.block_ids[:2]
    assert second.num_computed_tokens == 8
    stats = kv.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (22, 8)


def test_the_last_token_is_always_left_to_compute() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    compute(kv, admit(kv, list(range(8))), 8)
    assert len(kv.match_prefix(make_request("r", range(8)).sequences[0])) == 1
    assert len(kv.match_prefix(make_request("r", range(9)).sequences[0])) == 2


def test_equal_tokens_after_another_prefix_are_another_block() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    compute(kv, admit(kv, [0, 0, 0, 0, 1, 2, 3, 4, 9]), 9)
    assert kv.match_prefix(make_request("r", [1, 2, 3, 4, 9]).sequences[0]) == []


def test_tokens_still_in_flight_are_not_findable() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    sequence = admit(kv, [1, 2, 3])
    compute(kv, sequence, 3)
    sequence.num_pending_tokens = 1
    compute(kv, sequence, 1, step_id=1)
    assert kv.match_prefix(make_request("r", [1, 2, 3, 4, 5]).sequences[0]) == []
    sequence.num_pending_tokens = 0
    sequence.output_token_ids.append(4)
    kv.register_full_blocks(sequence)
    assert len(kv.match_prefix(make_request("r", [1, 2, 3, 4, 5]).sequences[0])) == 1


def test_a_failed_step_takes_back_what_it_promised() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    compute(kv, admit(kv, list(range(8))), 4, step_id=0)
    kv.retire(0)
    late = admit(kv, list(range(8)))
    compute(kv, late, 4, step_id=1)
    kv.drop_unproven(1)
    assert len(kv.match_prefix(make_request("r", range(20)).sequences[0])) == 1


def test_allocation_is_refused_whole_and_counted() -> None:
    kv = KVCacheManager(num_blocks=3, block_size=4)
    sequence = admit(kv, list(range(12)))
    assert kv.allocate_slots(sequence, 12, 0) is None
    assert sequence.block_ids == []
    assert kv.stats().allocation_failures == 1
    assert kv.stats().free_blocks == 2


def test_without_prefix_caching_nothing_is_found_or_counted() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4, enable_prefix_caching=False)
    sequence = admit(kv, list(range(9)))
    compute(kv, sequence, 9)
    assert kv.match_prefix(make_request("r", range(9)).sequences[0]) == []
    kv.free(sequence)
    kv.retire(0)
    assert (kv.stats().free_blocks, kv.stats().cached_blocks, kv.stats().prefix_queried_tokens) == (15, 0, 0)


class NaiveCache:
    """The same pool as plain lists and a dict of whole prefixes: obviously right, and slow."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(1, num_blocks))
        self.cached: list[int] = []
        self.waiting: list[tuple[int, int]] = []
        """(step, block)"""
        self.references: Counter[int] = Counter()
        self.prefixes: dict[tuple[int, ...], int] = {}
        self.busy_until: dict[int, int] = {}
        self.retired = -1

    def hit(self, tokens: list[int]) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * self.block_size <= len(tokens) - 1:
            prefix = tuple(tokens[: (len(found) + 1) * self.block_size])
            if prefix not in self.prefixes:
                break
            found.append(self.prefixes[prefix])
        return found

    def take(self) -> int:
        block = (self.free or self.cached).pop(0)
        self.prefixes = {prefix: other for prefix, other in self.prefixes.items() if other != block}
        self.references[block] = 1
        self.busy_until[block] = -1
        return block

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

    `contents` plays execution's part: (token, position) per slot, written and copied as the slots say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block_size, num_blocks = 2, 10
        self.kv = KVCacheManager(num_blocks, self.block_size)
        self.naive = NaiveCache(num_blocks, self.block_size)
        self.sequences: list[Sequence] = []
        self.contents = {block: [(-1, -1)] * self.block_size for block in range(num_blocks)}
        self.step = 0
        self.registered: list[tuple[int, int, tuple[int, ...]]] = []
        """(step, block, prefix) of what has become findable."""

    def pick(self, index: int) -> Sequence:
        return self.sequences[index % len(self.sequences)]

    @precondition(lambda self: len(self.sequences) < 6)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, prompt: list[int]) -> None:
        sequence = make_request("r", prompt).sequences[0]
        hits = self.kv.match_prefix(sequence)
        expected = self.naive.hit(prompt)
        assert [block.block_id for block in hits] == expected
        self.kv.admit(sequence, hits)
        for block in expected:
            self.naive.hold(block)
        self.sequences.append(sequence)

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
        needed = -(-(start + num_tokens) // self.block_size) - len(table)
        first = start // self.block_size
        copies = first < len(table) and self.naive.references[table[first]] > 1
        slots = self.kv.allocate_slots(sequence, num_tokens, self.step)
        assert (slots is not None) == (needed + copies <= available)
        if slots is None:
            return
        if copies:
            new = self.naive.take()
            others = [self.naive.take() for _ in range(needed)]
            self.naive.drop(table[first], self.step)
            assert slots.block_copies == [(table[first], new)]
            assert slots.replaced_blocks == [(first, new)]
            self.contents[new] = list(self.contents[table[first]])
            table[first] = new
            table += others
        else:
            table += [self.naive.take() for _ in range(needed)]
        assert sequence.block_ids == table
        self.write(sequence, start, start + num_tokens)

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        tokens, size = sequence.token_ids(), self.block_size
        for position in range(start, end):
            block = sequence.block_ids[position // size]
            assert self.naive.references[block] == 1, "a shared block was written"
            self.contents[block][position % size] = (tokens[position], position)
        sequence.num_computed_tokens, sequence.last_step_id = end, self.step
        self.kv.register_full_blocks(sequence)
        for index in range(start // size, end // size):
            prefix, block = tuple(tokens[: (index + 1) * size]), sequence.block_ids[index]
            if prefix not in self.naive.prefixes:
                self.naive.prefixes[prefix] = block
                self.registered.append((self.step, block, prefix))

    @precondition(lambda self: self.sequences and len(self.sequences) < 6)
    @rule(index=st.integers(0, 5))
    def fork(self, index: int) -> None:
        parent = self.pick(index)
        child = make_request("r", parent.token_ids()).sequences[0]
        self.kv.fork(parent, child)
        for block in parent.block_ids:
            self.naive.hold(block)
        self.sequences.append(child)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 5))
    def free(self, index: int) -> None:
        sequence = self.pick(index)
        self.sequences.remove(sequence)
        for block in reversed(sequence.block_ids):
            self.naive.drop(block, sequence.last_step_id)
        self.kv.free(sequence)

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
        for step, block, prefix in self.registered:
            if step >= failed and self.naive.prefixes.get(prefix) == block:
                self.naive.forget(block)
        for sequence in [s for s in self.sequences if s.last_step_id >= failed]:
            self.free(self.sequences.index(sequence))
        self.step += 1
        for step in range(failed, self.step):
            self.kv.retire(step)
            self.naive.retire(step)

    @invariant()
    def agrees_with_the_naive_cache(self) -> None:
        self.kv.check_integrity(self.sequences)
        queue = [block.block_id for block in self.kv.pool.free_queue()]
        assert queue == self.naive.free + self.naive.cached
        stats = self.kv.stats()
        assert stats.free_blocks == len(self.naive.free)
        assert stats.cached_blocks == len(self.naive.cached)
        assert stats.active_blocks == sum(count > 0 for count in self.naive.references.values())
        assert stats.reserved_blocks == 1 + len(self.naive.waiting)
        used = {(block, offset) for s in self.sequences for block, offset, _ in self.slots(s)}
        assert stats.filled_slots == len(used)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for sequence in self.sequences:
            tokens = sequence.token_ids()
            for block, offset, position in self.slots(sequence):
                assert self.contents[block][offset] == (tokens[position], position)

    @invariant()
    def findable_blocks_hold_what_they_are_found_for(self) -> None:
        for prefix, block in self.naive.prefixes.items():
            start = len(prefix) - self.block_size
            assert self.contents[block] == list(zip(prefix[start:], range(start, len(prefix)), strict=True))

    def slots(self, sequence: Sequence) -> list[tuple[int, int, int]]:
        size = self.block_size
        return [(sequence.block_ids[p // size], p % size, p) for p in range(sequence.num_computed_tokens)]


TestKVCacheMachine = KVCacheMachine.TestCase
TestKVCacheMachine.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
