"""The queue's benchmark with few jobs."""

from __future__ import annotations

import pytest

from benchmarks.queues import rates as queue


@pytest.mark.slow
def test_the_queue_is_measured_on_a_server_of_its_own() -> None:
    words = "--jobs 400 --waiting 300 500 --pulls 3 --rounds 1 --workers 2 --at-once 16"
    figures = queue.measure("valkey", queue.parser().parse_args(words.split()))
    assert "submit_many" in figures.rates
    assert all(rate > 0 for rates in figures.rates.values() for rate in rates)
    assert all(cost.client_us > 0 for costs in figures.costs.values() for cost in costs)
    (drained,) = figures.drained
    assert drained.jobs == 400
    assert drained.rate > 0
    assert all(500 < taken < 1200 for taken in figures.bytes_per_job.values()), "prompts of some 500 bytes"
    assert list(figures.pull_us) == ["nothing waiting", "16 waiting", "300 waiting", "500 waiting"]
    assert queue.table([figures]).row_count >= 10
    told = [goal.as_json() for goal in queue.goals(figures)]
    assert queue.goal_table([figures]).row_count == len(told)
    assert {"pulls and commits a second >= 20000"} < {goal["goal"] for goal in told}
    assert all(goal["reached"] for goal in told)
