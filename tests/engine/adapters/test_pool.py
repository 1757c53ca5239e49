"""Which adapters are in memory: slots, bytes, order, and waiting requests; with layers that load instantly."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.adapters.pool import AGEING_S, AdapterLimits, AdapterPool
from pagemill.engine.errors import AdapterError, EngineError, UnknownAdapter


@dataclass
class _Ready:
    adapter: Adapter


@dataclass
class Layers:
    """Every folder holds an adapter of ten bytes, or of the number at the end of its name."""

    slots: dict[int, str] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def read(self, adapter: Adapter) -> Any:
        name = adapter.directory.name
        if name in self.broken:
            raise AdapterError("broken")
        size = int(name.rpartition("-")[2]) if "-" in name else 10
        return _Ready(replace(adapter, digest=name, rank=1, num_bytes=size))

    def install(self, slot: int, ready: Any) -> None:
        assert slot not in self.slots
        self.slots[slot] = ready.adapter.name

    def clear(self, slot: int) -> None:
        del self.slots[slot]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pool_of(slots: int = 2, memory: int = 100, names: str = "abcd") -> tuple[AdapterPool, Layers, Clock]:
    layers, clock = Layers(), Clock()
    pool = AdapterPool(layers, AdapterLimits(8, slots, memory), clock)
    for name in names:
        pool.add(name, Path(name))
    return pool, layers, clock


def served(pool: AdapterPool) -> dict[str, int | EngineError]:
    """The ready requests once no adapter is being read any more."""
    found: dict[str, int | EngineError] = {}
    for _ in range(4):
        found |= dict(pool.ready(10.0))
    return found


def test_the_one_unused_for_longest_makes_room() -> None:
    pool, layers, _ = pool_of()
    for request, name in (("1", "a"), ("2", "b")):
        assert pool.attach(request, pool.find(name)) is None
        assert set(served(pool)) == {request}
        pool.release(request)
    assert pool.attach("3", pool.find("a")) is not None  # in memory
    pool.release("3")
    pool.attach("4", pool.find("c"))
    assert set(served(pool)) == {"4"}
    assert sorted(layers.slots.values()) == ["a", "c"]
    stats = pool.stats()
    assert (stats.loads, stats.evictions, stats.resident, stats.used_bytes) == (3, 1, 2, 20)
    assert stats.requests == {"a": 2, "b": 1, "c": 1, "d": 0}


def test_who_finds_every_slot_in_use_waits_for_one() -> None:
    pool, _, _ = pool_of(slots=1)
    pool.attach("1", pool.find("a"))
    assert set(served(pool)) == {"1"}
    pool.attach("2", pool.find("b"))
    assert served(pool) == {}
    assert len(pool) == 1
    assert "2" in pool
    pool.release("1")
    assert set(served(pool)) == {"2"}


def test_nobody_overtakes_who_has_waited_long() -> None:
    pool, _, clock = pool_of(slots=1)
    pool.attach("1", pool.find("a"))
    served(pool)
    pool.attach("2", pool.find("b"))
    assert pool.attach("3", pool.find("a")) is not None, "a steady flow may pass for a while"
    clock.now += 2 * AGEING_S
    assert pool.attach("4", pool.find("a")) is None
    assert served(pool) == {}
    pool.release("1")
    pool.release("3")
    assert set(served(pool)) == {"2"}
    pool.release("2")
    assert set(served(pool)) == {"4"}


def test_bytes_are_bounded() -> None:
    pool, layers, _ = pool_of(slots=8, memory=25, names="")
    for name in ("a-10", "b-10", "c-20"):
        pool.add(name, Path(name))
    with pytest.raises(AdapterError, match="26 bytes, adapter_memory_bytes is 25"):
        pool.add("d", Path("d-26"))
    for request, name in (("1", "a-10"), ("2", "b-10")):
        pool.attach(request, pool.find(name))
    assert set(served(pool)) == {"1", "2"}
    pool.attach("3", pool.find("c-20"))
    pool.release("1")
    assert served(pool) == {}
    pool.release("2")
    assert set(served(pool)) == {"3"}
    assert list(layers.slots.values()) == ["c-20"]


def test_a_folder_that_breaks_later_fails_its_requests_alone() -> None:
    pool, layers, _ = pool_of()
    layers.broken.add("a")
    pool.attach("1", pool.find("a"))
    pool.attach("2", pool.find("b"))
    found = served(pool)
    assert isinstance(found["1"], EngineError)
    assert "adapter a can't be loaded: broken" in str(found["1"])
    assert isinstance(found["2"], int)


def test_names() -> None:
    pool, _, _ = pool_of(names="ba")
    assert [adapter.name for adapter in pool.registered()] == ["a", "b"]
    with pytest.raises(UnknownAdapter, match="unknown adapter 'z'; known: a, b"):
        pool.find("z")
    running = pool.find("a")
    pool.attach("1", running)
    pool.remove("a")
    assert set(served(pool)) == {"1"}, "what has begun ends"
    with pytest.raises(UnknownAdapter):
        pool.remove("a")
    with pytest.raises(AdapterError, match="1 to 64"):
        pool.add("a b", Path("x"))
    for number in range(7):
        pool.add(f"n{number}", Path("x"))
    with pytest.raises(AdapterError, match="max_adapters is 8"):
        pool.add("more", Path("x"))
    pool.add("b", Path("y"))
    assert pool.find("b").digest == "y"


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 3),
    requests=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), min_size=1, max_size=25),
)
def test_every_request_is_served_in_the_end(slots: int, requests: list[tuple[str, int]]) -> None:
    """For any order of slots, arrivals and ends, no slot holds two adapters, and no request waits forever."""
    pool, layers, clock = pool_of(slots=slots)
    holding: dict[str, int] = {}

    def take(found: dict[str, Any]) -> None:
        holding.update(found)
        for request_id, slot in found.items():
            assert layers.slots[slot] == request_id.partition(":")[0]

    for number, (name, ends) in enumerate(requests):
        request_id = f"{name}:{number}"
        slot = pool.attach(request_id, pool.find(name))
        take({} if slot is None else {request_id: slot})
        take(dict(pool.ready(1.0)))
        clock.now += 0.4
        for done in list(holding)[:ends]:
            del holding[done]
            pool.release(done)
    for _ in range(4 * len(requests)):
        for done in list(holding):
            del holding[done]
            pool.release(done)
        clock.now += 0.4
        take(dict(pool.ready(1.0)))
    assert len(pool) == 0
