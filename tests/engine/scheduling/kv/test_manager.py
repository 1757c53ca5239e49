"""Block tables: prefix hits, forks, copy-on-write."""

from __future__ import annotations

from pagemill.engine.scheduling.kv.manager import AllocatedSlots, KVCacheManager
from pagemill.engine.scheduling.request import Sequence
from tests.engine.scheduling.harness import make_request


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
    kv.admit(sequence, kv.match_prefix(sequence), step_id=0)
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
    assert len(kv.match_prefix(make_request("r", range(8)).sequences[0]).entries) == 1
    assert len(kv.match_prefix(make_request("r", range(9)).sequences[0]).entries) == 2


def test_equal_tokens_after_another_prefix_are_another_block() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    compute(kv, admit(kv, [0, 0, 0, 0, 1, 2, 3, 4, 9]), 9)
    assert kv.match_prefix(make_request("r", [1, 2, 3, 4, 9]).sequences[0]).entries == []


def test_tokens_still_in_flight_are_not_findable() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    sequence = admit(kv, [1, 2, 3])
    compute(kv, sequence, 3)
    sequence.num_pending_tokens = 1
    compute(kv, sequence, 1, step_id=1)
    assert kv.match_prefix(make_request("r", [1, 2, 3, 4, 5]).sequences[0]).entries == []
    sequence.num_pending_tokens = 0
    sequence.output_token_ids.append(4)
    kv.register_full_blocks(sequence)
    assert len(kv.match_prefix(make_request("r", [1, 2, 3, 4, 5]).sequences[0]).entries) == 1


def test_a_failed_step_takes_back_what_it_promised() -> None:
    kv = KVCacheManager(num_blocks=16, block_size=4)
    compute(kv, admit(kv, list(range(8))), 4, step_id=0)
    kv.retire(0)
    late = admit(kv, list(range(8)))
    compute(kv, late, 4, step_id=1)
    kv.drop_unproven(1)
    assert len(kv.match_prefix(make_request("r", range(20)).sequences[0]).entries) == 1


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
    assert kv.match_prefix(make_request("r", range(9)).sequences[0]).entries == []
    kv.free(sequence)
    kv.retire(0)
    assert (kv.stats().free_blocks, kv.stats().cached_blocks, kv.stats().prefix_queried_tokens) == (15, 0, 0)
