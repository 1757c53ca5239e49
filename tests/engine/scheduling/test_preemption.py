"""Preemption: the victims when blocks run out, and the state that they keep."""

from __future__ import annotations

from dataclasses import replace

from pagemill.engine.scheduling.request import SequenceStatus
from tests.engine.scheduling.harness import (
    PROMPT,
    Harness,
    expected,
    make_config,
    make_request,
    result,
    schedule,
    tokens_by_row,
)


class TestPreemption:
    def test_the_latest_of_the_lowest_priority_yields_and_loses_no_token(self) -> None:
        harness = Harness(make_config(num_kv_blocks=7, enable_prefix_caching=False))
        low = harness.add(make_request("low", PROMPT, priority=1, arrival=0.0, max_tokens=10))
        high = harness.add(make_request("high", PROMPT, priority=0, arrival=5.0, max_tokens=10))
        while not harness.scheduler.stats().preemptions:
            harness.step()
        assert low.sequences[0].status is SequenceStatus.WAITING
        assert high.sequences[0].status is SequenceStatus.RUNNING
        kept = list(low.sequences[0].output_token_ids)
        harness.run()
        assert low.sequences[0].output_token_ids[: len(kept)] == kept
        for request in (low, high):
            assert request.sequences[0].output_token_ids == expected(harness, request)[0]
        assert harness.scheduler.stats().preempted_tokens > 0

    def test_a_victim_keeps_its_place_before_later_arrivals(self) -> None:
        harness = Harness(make_config(num_kv_blocks=7, enable_prefix_caching=False, max_num_seqs=2))
        harness.add(make_request("a", PROMPT, max_tokens=14))
        harness.add(make_request("b", PROMPT, max_tokens=14))
        harness.add(make_request("c", PROMPT, max_tokens=14))
        harness.run()
        entered = [new.request_id for plan in harness.plans for new in plan.new_rows]
        assert entered[:3] == ["a", "b", "b"]

    def test_at_depth_one_blocks_on_their_way_back_are_waited_for(self) -> None:
        harness = Harness(make_config(num_kv_blocks=6, depth=1, enable_prefix_caching=False, block_size=4))
        for name in "abc":
            harness.add(make_request(name, range(4), max_tokens=12))
        harness.run()
        # Each shortage is one block; a second victim in the same step would be too many.
        victims = [len(plan.freed_rows) for plan in harness.plans]
        assert harness.scheduler.stats().preemptions > 0
        assert max(victims) == 1

    def test_nobody_takes_the_blocks_that_an_older_sequence_waits_for(self) -> None:
        config = make_config(block_size=1, num_kv_blocks=15, depth=1, enable_prefix_caching=False)
        harness = Harness(replace(config, long_prefill_token_threshold=3))
        harness.add(make_request("old", range(9), max_tokens=1))
        harness.add(make_request("young", [1], max_tokens=5))
        youngest = harness.add(make_request("youngest", range(3), max_tokens=2))
        first, second = schedule(harness), schedule(harness)
        harness.scheduler.update(first, result(first, 1, 1))
        # Two blocks are left, "old" needs three: it waits for the victim's, which the step in flight uses.
        assert harness.schedule() is None
        assert harness.scheduler.kv_cache.stats().free_blocks == 2
        harness.scheduler.update(second, result(second, 1, 1))
        assert youngest.sequences[0].finish_reason == "length"
        assert tokens_by_row(schedule(harness)) == {0: 3, 1: 1}
