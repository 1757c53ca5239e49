"""The pause of the garbage collector ends with the body, and does not start if the collector is off."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from pagemill.common.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_no_collection_runs_in_the_body() -> None:
    before = gc.get_stats()[0]["collections"]
    with gc_paused():
        kept = [[number] for number in range(50_000)]
        assert gc.get_stats()[0]["collections"] == before
    assert gc.isenabled()
    assert len(kept) == 50_000


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(ValueError, match="broken"), gc_paused():
        raise ValueError("broken")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()
