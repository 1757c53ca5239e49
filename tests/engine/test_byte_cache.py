"""A cache bounded by bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemill.engine.byte_cache import ByteCache, text_bytes


def make(max_bytes: int) -> ByteCache[str, bytes]:
    return ByteCache(max_bytes, lambda key, value: len(key) + len(value))


def test_what_was_not_used_for_longest_is_dropped() -> None:
    cache = make(30)
    for key in "abc":
        cache.put(key, bytes(9))
    assert cache.get("a") == bytes(9)
    cache.put("d", bytes(9))
    assert [key for key in "abcd" if cache.get(key) is not None] == ["a", "c", "d"]
    assert cache.num_bytes == 30


def test_what_would_not_fit_alone_is_not_kept_and_drops_nobody() -> None:
    cache = make(30)
    cache.put("a", bytes(9))
    cache.put("b", bytes(30))
    assert cache.get("b") is None
    assert cache.get("a") is not None
    cache.put("a", bytes(30))
    assert (cache.get("a"), len(cache), cache.num_bytes) == (None, 0, 0)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 40)), max_size=60))
def test_it_never_holds_more_than_it_may(puts: list[tuple[str, int]]) -> None:
    cache = make(64)
    for key, size in puts:
        cache.put(key, bytes(size))
        held = {key: value for key in "abcdefgh" if (value := cache.get(key)) is not None}
        assert cache.num_bytes == sum(1 + len(value) for value in held.values()) <= 64
        assert len(cache) == len(held)
        assert held.get(key) == bytes(size)


def test_a_text_counts_as_what_it_takes_in_memory() -> None:
    assert text_bytes(["a" * 1000]) >= 1000
    assert text_bytes(["é€" * 1000, "😀" * 1000]) >= 2 * 2000 + 4 * 1000
