"""The free queue and the block pool: states, eviction order, sharing, deferred frees."""

from __future__ import annotations

import pytest

from pagemill.engine.scheduling.blocks import KVBlock
from pagemill.engine.scheduling.kv.block_pool import BlockPool, FreeBlockQueue


def ids(blocks: list[KVBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def states(pool: BlockPool) -> tuple[int, int, int, int]:
    pool.check_integrity()
    return pool.num_free, pool.num_cached, pool.num_active, pool.num_reserved


def cache_chain(pool: BlockPool, name: str, num_blocks: int) -> list[KVBlock]:
    """A sequence's blocks, filled, hashed and released tail first."""
    blocks = pool.allocate(num_blocks)
    for index, block in enumerate(blocks):
        pool.register(block, f"{name}{index}".encode())
    pool.release(reversed(blocks), last_step_id=-1)
    return blocks


def test_queue_removes_from_the_middle_and_keeps_order() -> None:
    queue, blocks = FreeBlockQueue(), [KVBlock(block_id) for block_id in range(5)]
    for block in blocks:
        queue.append(block)
    queue.remove(blocks[2])
    queue.prepend(blocks[2])
    assert ids(list(queue)) == [2, 0, 1, 3, 4]
    assert queue.popleft() is blocks[2]
    assert len(queue) == 4
    with pytest.raises(AssertionError):
        queue.remove(blocks[2])
    with pytest.raises(AssertionError):
        queue.append(blocks[0])


def test_an_empty_queue_has_nothing_to_pop() -> None:
    with pytest.raises(AssertionError):
        FreeBlockQueue().popleft()


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert ids(pool.allocate(3)) == [1, 2, 3]
    assert states(pool) == (0, 0, 3, 1)
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_a_pool_needs_two_blocks() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_eviction_takes_free_blocks_then_the_oldest_chain_tail_first() -> None:
    pool = BlockPool(8)
    first, second = cache_chain(pool, "a", 3), cache_chain(pool, "b", 2)
    assert states(pool) == (2, 5, 0, 1)
    assert ids(pool.free_queue()) == [6, 7, *ids(first[::-1]), *ids(second[::-1])]
    pool.allocate(3)
    assert pool.evictions == 1
    assert pool.lookup(b"a2") is None
    assert pool.lookup(b"a1") is first[1]


def test_a_hit_makes_a_chain_the_most_recent() -> None:
    pool = BlockPool(6)
    first, second = cache_chain(pool, "a", 2), cache_chain(pool, "b", 2)
    for block in first:
        pool.acquire(block)
    assert states(pool) == (1, 2, 2, 1)
    pool.release(reversed(first), last_step_id=-1)
    assert ids(pool.free_queue()) == [5, *ids(second[::-1]), *ids(first[::-1])]


def test_sharing_is_counted_and_ends_with_the_last_reference() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.fill(block, 3)
    pool.acquire(block)
    assert (pool.num_shared, pool.num_references, pool.filled_slots) == (1, 2, 3)
    pool.release([block], last_step_id=-1)
    assert (pool.num_shared, pool.num_references, pool.num_active) == (0, 1, 1)
    pool.release([block], last_step_id=-1)
    assert states(pool) == (3, 0, 0, 1)
    assert pool.filled_slots == 0
    with pytest.raises(AssertionError):
        pool.release([block], last_step_id=-1)


def test_a_block_waits_for_the_last_step_that_names_it_for_any_holder() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    pool.release([block], last_step_id=7)
    pool.release([block], last_step_id=5)
    assert states(pool) == (1, 0, 0, 2)
    pool.retire(6)
    assert states(pool) == (1, 0, 0, 2)
    pool.retire(7)
    assert states(pool) == (2, 0, 0, 1)


def test_a_reserved_block_can_be_hit_and_reserved_again() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.register(block, b"a")
    pool.release([block], last_step_id=1)
    pool.acquire(block)
    assert states(pool) == (1, 0, 1, 1)
    pool.release([block], last_step_id=2)
    pool.retire(1)
    assert states(pool) == (1, 0, 0, 2)
    pool.retire(2)
    assert states(pool) == (1, 1, 0, 1)


def test_the_first_of_two_equal_blocks_stays_the_one_that_is_found() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    assert pool.register(first, b"a")
    assert not pool.register(second, b"a")
    assert pool.lookup(b"a") is first
    pool.release([second, first], last_step_id=-1)
    assert states(pool) == (2, 1, 0, 1)


def test_a_forgotten_block_is_free_and_used_first() -> None:
    pool = BlockPool(4)
    blocks = cache_chain(pool, "a", 2)
    pool.forget(blocks[0])
    assert states(pool) == (2, 1, 0, 1)
    assert pool.lookup(b"a0") is None
    assert ids(pool.free_queue()) == [1, 3, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: setattr(pool.blocks[1], "ref_count", 2),
        lambda pool: setattr(pool.blocks[3], "ref_count", 1),
        lambda pool: setattr(pool.blocks[3], "block_hash", b"x"),
        lambda pool: setattr(pool.blocks[2], "block_hash", None),
        lambda pool: setattr(pool.blocks[1], "num_filled", 9),
        lambda pool: setattr(pool, "num_cached", 0),
        lambda pool: setattr(pool.blocks[3], "is_reserved", True),
    ],
)
def test_check_integrity_notices_damage(damage) -> None:  # type: ignore[no-untyped-def]
    pool = BlockPool(4)
    pool.allocate(1)
    (cached,) = pool.allocate(1)
    pool.register(cached, b"a")
    pool.release([cached], last_step_id=-1)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()
