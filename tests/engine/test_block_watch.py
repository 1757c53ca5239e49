"""Maps of the block pool: correct at any time, and computed only while a viewer is connected."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pagemill.engine import block_watch
from pagemill.engine.block_watch import MIN_INTERVAL_S, BlockWatch
from pagemill.engine.scheduling.kv.block_pool import BlockPool


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(block_watch.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def counted(pool: BlockPool) -> dict[str, int]:
    states = pool.states().decode()
    assert len(states) == pool.capacity
    return {letter: states.count(letter) for letter in "fcasr"}


def test_the_letters_agree_with_the_pool_s_counts_after_every_operation() -> None:
    draw = random.Random(5)
    pool = BlockPool(40)
    held: list[object] = []
    for step in range(400):
        action = draw.random()
        if action < 0.4 and pool.num_available:
            (block,) = pool.allocate(1)
            pool.fill(block, 16)
            if draw.random() < 0.7:
                pool.register(block, f"{step}".encode())
            held.append(block)
        elif action < 0.6 and held:
            block = draw.choice(held)  # type: ignore[assignment]
            pool.acquire(block)
            held.append(block)
        elif held:
            block = held.pop(draw.randrange(len(held)))  # type: ignore[assignment]
            pool.release([block], draw.choice((step, step - 5)))
        pool.retire(step - 3)
        found = counted(pool)
        assert found["f"] == pool.num_free
        assert found["c"] == pool.num_cached
        assert found["a"] + found["s"] == pool.num_active
        assert found["s"] == pool.num_shared
        assert found["r"] == pool.num_reserved
    assert pool.states()[:1] == b"r", "the null block"


def test_nothing_is_read_while_nobody_looks(clock: Clock) -> None:
    watch = BlockWatch(lambda: pytest.fail("the pool was walked"))
    for _ in range(5):
        watch.observe()
        clock.now += 1.0
    assert watch.latest is None


def test_maps_come_no_more_often_than_they_should_and_end_with_the_interest(clock: Clock) -> None:
    taken: list[float] = []

    def read() -> bytes:
        taken.append(clock.now)
        return b"rf"

    watch = BlockWatch(read)
    watch.watch_for(2.0)
    for _ in range(40):
        watch.observe()
        clock.now += 0.1
    assert all(round(after - before, 3) >= MIN_INTERVAL_S for before, after in pairwise(taken))
    assert 4 <= len(taken) <= 5, "for two seconds"
    assert watch.latest is None, "a map that nobody looks at is dropped"


def test_a_pool_that_is_slow_to_read_is_read_less_often(clock: Clock) -> None:
    taken: list[float] = []

    def read() -> bytes:
        taken.append(clock.now)
        clock.now += 0.05
        return b"r"

    watch = BlockWatch(read)
    watch.watch_for(60.0)
    for _ in range(200):
        watch.observe()
        clock.now += 0.1
    assert len(taken) <= 5, "five steps of a hundred in reading maps would be five per cent"
