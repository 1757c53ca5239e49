"""The KV cache as a state machine: random sequences come, fork, swap and go, beside a naive cache."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagemill.engine.scheduling.blocks import HostBlock, KVBlock
from pagemill.engine.scheduling.kv.manager import KVCacheManager
from pagemill.engine.scheduling.request import Sequence
from tests.engine.scheduling.harness import make_request


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


NUM_HOST_BLOCKS = 6


class KVCacheMachine(RuleBasedStateMachine):
    """Random sequences over a small pool; after every rule the manager must agree with `NaiveCache`.

    `contents` plays execution's part: (token, position) per slot, written and copied as the slots say.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block_size, num_blocks = 2, 10
        self.kv = KVCacheManager(num_blocks, self.block_size, num_host_blocks=NUM_HOST_BLOCKS)
        self.swapped: list[Sequence] = []
        self.host: dict[int, list[tuple[int, int]]] = {}
        """Contents of host blocks."""
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

    @precondition(lambda self: any(s.block_ids for s in self.sequences))
    @rule(index=st.integers(0, 5))
    def swap_out(self, index: int) -> None:
        holders = [sequence for sequence in self.sequences if sequence.block_ids]
        sequence = holders[index % len(holders)]
        space = self.kv.swap_space
        own = [block for block in sequence.block_ids if self.naive.references[block] == 1]
        quote = space.quote([sequence])
        assert quote.num_blocks == len(own)
        tokens_in_own = [p for b, _, p in self.slots(sequence) if b in own]
        assert quote.num_tokens == len(tokens_in_own)
        if len(own) > space.num_free:
            return
        self.sequences.remove(sequence)
        self.swapped.append(sequence)
        last_step = sequence.last_step_id
        for block in reversed(sequence.block_ids):
            if block in own:
                self.naive.drop(block, last_step)
        space.swap_out([sequence])
        kept = [entry.block_id for entry in sequence.swapped_blocks if isinstance(entry, KVBlock)]
        assert len(kept) + len(own) == len(sequence.swapped_blocks)
        assert not set(kept) & set(own)
        self.copy()

    @precondition(lambda self: self.swapped and len(self.sequences) < 6)
    @rule(index=st.integers(0, 5))
    def swap_in(self, index: int) -> None:
        sequence = self.swapped[index % len(self.swapped)]
        tokens, size = sequence.token_ids(), self.block_size
        if sequence.num_computed_tokens == sequence.num_known_tokens:
            sequence.output_token_ids.append(0)  # as sampled before it was preempted
        found, missing = {}, []
        for number, entry in enumerate(sequence.swapped_blocks):
            if isinstance(entry, HostBlock):
                end = (number + 1) * size
                block = (
                    self.naive.prefixes.get(tuple(tokens[:end]))
                    if end <= sequence.num_computed_tokens
                    else None
                )
                found |= {number: block} if block is not None else {}
                missing += [number] if block is None else []
        idle = {block for block in found.values() if block in self.naive.cached}
        available = len(self.naive.free) + len(self.naive.cached)
        assert self.kv.swap_space.num_blocks_taken([sequence]) == len(missing) + len(idle)
        if len(missing) + len(idle) > available:
            return
        for block in found.values():
            self.naive.hold(block)
        taken = {number: self.naive.take() for number in missing}
        kept = [entry.block_id if isinstance(entry, KVBlock) else None for entry in sequence.swapped_blocks]
        self.kv.swap_space.swap_in([sequence])
        expected = [block if block is not None else (found | taken)[i] for i, block in enumerate(kept)]
        assert sequence.block_ids == expected
        self.copy()
        self.swapped.remove(sequence)
        self.sequences.append(sequence)
        sequence.last_step_id = self.step
        self.kv.register_full_blocks(sequence)
        for number, block in enumerate(sequence.block_ids):
            prefix = tuple(tokens[: (number + 1) * size])
            is_full = (number + 1) * size <= sequence.num_computed_tokens
            if is_full and prefix not in self.naive.prefixes and block not in self.naive.prefixes.values():
                self.naive.prefixes[prefix] = block
                self.registered.append((self.step, block, prefix))

    @precondition(lambda self: len(self.sequences) < 6 and any(s.block_ids for s in self.sequences))
    @rule(index=st.integers(0, 5))
    def swap_out_and_in(self, index: int) -> None:
        """Sequences of events that rarely follow each other by chance."""
        self.swap_out(index)
        self.launch()
        if self.swapped:
            self.swap_in(len(self.swapped) - 1)

    @precondition(lambda self: self.swapped)
    @rule(index=st.integers(0, 5))
    def drop_swapped(self, index: int) -> None:
        sequence = self.swapped.pop(index % len(self.swapped))
        for entry in reversed(sequence.swapped_blocks):
            if isinstance(entry, KVBlock):
                self.naive.drop(entry.block_id, sequence.last_step_id)
        self.kv.swap_space.drop(sequence)

    def copy(self) -> None:
        """Carry out the copies that the next plan would bring, in its order."""
        outgoing, incoming = self.kv.swap_space.take_copies(self.step)
        for block, host in outgoing:
            self.host[host] = list(self.contents[block])
        for host, block in incoming:
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
        for step, block, prefix in self.registered:
            if step >= failed and self.naive.prefixes.get(prefix) == block:
                self.naive.forget(block)
        for sequence in [s for s in self.sequences if s.last_step_id >= failed]:
            self.free(self.sequences.index(sequence))
        for sequence in [s for s in self.swapped if s.last_step_id >= failed]:
            self.drop_swapped(self.swapped.index(sequence))
        self.step += 1
        for step in range(failed, self.step):
            self.kv.retire(step)
            self.naive.retire(step)

    @invariant()
    def agrees_with_the_naive_cache(self) -> None:
        self.kv.check_integrity(self.sequences + self.swapped)
        queue = [block.block_id for block in self.kv.pool.free_queue()]
        assert queue == self.naive.free + self.naive.cached
        stats = self.kv.stats()
        assert stats.free_blocks == len(self.naive.free)
        assert stats.cached_blocks == len(self.naive.cached)
        assert stats.active_blocks == sum(count > 0 for count in self.naive.references.values())
        assert stats.reserved_blocks == 1 + len(self.naive.waiting)
        used = {(block, offset) for s in self.sequences for block, offset, _ in self.slots(s)}
        for sequence in self.swapped:
            for number, entry in enumerate(sequence.swapped_blocks):
                filled = min(self.block_size, sequence.num_computed_tokens - number * self.block_size)
                if isinstance(entry, KVBlock):
                    used.update((entry.block_id, offset) for offset in range(filled))
        assert stats.host_used_blocks == len(
            {entry for s in self.swapped for entry in s.swapped_blocks if isinstance(entry, HostBlock)}
        )
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
