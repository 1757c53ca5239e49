"""The fleet's benchmark in small."""

from __future__ import annotations

import pytest

from benchmarks.queues import fleet


@pytest.mark.slow
@pytest.mark.parametrize("place", fleet.PLACES)
def test_more_workers_are_measured_where_they_are_asked_for(place: str) -> None:
    rates = fleet.measure([place], [1, 4], jobs=60, step_ms=10)
    assert list(rates[place]) == [1, 4]
    assert all(rate > 0 for rate in rates[place].values())
    assert fleet.table(rates).row_count == 2
