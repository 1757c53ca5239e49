"""Admission: order, budget, and the limits of a batch."""

from __future__ import annotations

import pytest

from pagemill.engine.errors import InvalidRequest, NeverFits
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


class TestOrderAndBudget:
    def test_an_empty_scheduler_plans_nothing(self) -> None:
        harness = Harness(make_config())
        assert harness.schedule() is None
        assert not harness.scheduler.has_unfinished()

    def test_a_prompt_runs_whole_and_samples_from_its_last_token(self) -> None:
        harness = Harness(make_config())
        harness.add(make_request("a", PROMPT, seed=3))
        plan = schedule(harness)
        assert [(new.row, new.request_id, new.token_ids, new.seed) for new in plan.new_rows] == [
            (0, "a", PROMPT, 3)
        ]
        assert [(work.start, work.num_tokens, work.new_block_ids) for work in plan.work] == [(0, 7, [1, 2])]
        assert [(s.row, s.token_index, s.position) for s in plan.samples] == [(0, 6, 7)]

    def test_rows_with_one_token_come_first_and_samples_index_the_flattened_tokens(self) -> None:
        harness = Harness(make_config(enable_prefix_caching=False, max_num_batched_tokens=8))
        harness.add(make_request("long", range(20), arrival=1.0))
        harness.step()
        harness.step()
        harness.add(make_request("short", PROMPT[:3], arrival=0.0))
        plan = schedule(harness)
        assert [(work.row, work.num_tokens) for work in plan.work] == [(0, 4), (1, 3)]
        assert [(s.row, s.token_index) for s in plan.samples] == [(0, 3), (1, 6)]
        harness.scheduler.update(plan, result(plan, 1, 1))
        harness.add(make_request("next", PROMPT))
        plan = schedule(harness)
        assert [work.num_tokens for work in plan.work] == [1, 1, 6]
        assert [s.token_index for s in plan.samples] == [0, 1]

    def test_a_prefill_is_cut_by_the_budget_and_goes_on_in_the_next_step(self) -> None:
        harness = Harness(make_config(max_num_batched_tokens=5))
        request = harness.add(make_request("a", range(12)))
        updates = [harness.step() for _ in range(3)]
        assert [plan.num_tokens for plan in harness.plans] == [5, 5, 2]
        assert [[update.new_token_ids for update in step] for step in updates[:2]] == [[[]], [[]]]
        assert updates[2][0].new_token_ids == expected(harness, request)[0][:1]

    def test_a_long_prefill_leaves_budget_for_others(self) -> None:
        harness = Harness(make_config(long_prefill_token_threshold=4))
        harness.add(make_request("long", range(30)))
        harness.add(make_request("short", [40, 41]))
        assert tokens_by_row(schedule(harness)) == {0: 4, 1: 2}

    def test_a_budget_below_the_number_of_rows_serves_the_oldest_first(self) -> None:
        harness = Harness(make_config(max_num_batched_tokens=2))
        requests = [harness.add(make_request(name, [1, 2], n=2, temperature=1.0)) for name in "abc"]
        harness.run()
        for request in requests:
            assert [s.output_token_ids for s in request.sequences] == [
                expected(harness, request, i)[0] for i in (0, 1)
            ]

    def test_waiting_requests_enter_by_priority_then_arrival_then_insertion(self) -> None:
        harness = Harness(make_config(max_num_seqs=5))
        for name, priority, arrival in (
            ("a", 1, 0.0),
            ("b", 0, 2.0),
            ("c", 0, 1.0),
            ("d", 0, 2.0),
            ("e", -1, 9.0),
        ):
            harness.add(make_request(name, [ord(name)], priority=priority, arrival=arrival))
        assert [new.request_id for new in schedule(harness).new_rows] == ["e", "c", "b", "d", "a"]

    def test_a_freed_row_is_reused_at_once(self) -> None:
        harness = Harness(make_config(max_num_seqs=1))
        harness.add(make_request("a", [1, 2], max_tokens=1))
        harness.add(make_request("b", [3, 4], max_tokens=1))
        harness.step()
        plan = schedule(harness)
        assert plan.freed_rows == [0]
        assert [(new.row, new.request_id) for new in plan.new_rows] == [(0, "b")]


class TestAdmission:
    def test_what_can_never_fit_is_refused_and_what_just_fits_runs(self) -> None:
        harness = Harness(make_config(num_kv_blocks=4))
        with pytest.raises(NeverFits):
            harness.add(make_request("a", range(10), max_tokens=4))
        request = harness.add(make_request("b", range(10), max_tokens=3))
        harness.run()
        assert request.sequences[0].output_token_ids == expected(harness, request)[0]

    def test_shared_prompt_blocks_count_once_towards_fitting(self) -> None:
        # 8 prompt tokens in 2 shared blocks, and each sample's 4 + 1 further slots in 2 separate ones.
        assert Harness(make_config(num_kv_blocks=7)).add(make_request("a", range(8), n=2, max_tokens=6))
        with pytest.raises(NeverFits):
            Harness(make_config(num_kv_blocks=6)).add(make_request("a", range(8), n=2, max_tokens=6))

    def test_more_samples_than_rows_are_refused(self) -> None:
        with pytest.raises(NeverFits):
            Harness(make_config(max_num_seqs=2)).add(make_request("a", PROMPT, n=3))

    def test_a_used_id_and_an_already_complete_request_are_refused(self) -> None:
        harness = Harness(make_config())
        harness.add(make_request("a", PROMPT))
        with pytest.raises(InvalidRequest):
            harness.add(make_request("a", PROMPT))
        complete = make_request("b", PROMPT, max_tokens=2)
        complete.sequences[0].output_token_ids = [1, 2]
        with pytest.raises(InvalidRequest):
            harness.add(complete)

    def test_the_watermark_is_kept_free_while_something_runs(self) -> None:
        harness = Harness(make_config(num_kv_blocks=11, watermark_ratio=0.3))
        harness.add(make_request("a", range(20)))
        assert harness.scheduler.capacity().available_blocks == 7
        harness.step()
        harness.add(make_request("b", range(40, 52)))
        assert harness.scheduler.capacity().available_blocks == 2
        assert [work.row for work in schedule(harness).work] == [0]
        assert harness.scheduler.num_waiting == 1

    def test_alone_a_request_may_go_below_the_watermark(self) -> None:
        harness = Harness(make_config(num_kv_blocks=5, watermark_ratio=0.9))
        harness.add(make_request("a", range(10), max_tokens=4))
        assert schedule(harness).num_tokens == 10

    def test_blocks_promised_to_an_unfinished_prefill_are_not_given_away(self) -> None:
        harness = Harness(
            make_config(num_kv_blocks=9, long_prefill_token_threshold=4, enable_prefix_caching=False)
        )
        harness.add(make_request("long", range(24), max_tokens=1))
        harness.add(make_request("late", range(30, 42), max_tokens=1))
        assert [new.request_id for new in schedule(harness).new_rows] == ["long"]

    def test_equal_cold_prefixes_in_one_step_are_computed_once(self) -> None:
        harness = Harness(make_config(max_num_batched_tokens=256, num_kv_blocks=200))
        requests = [harness.add(make_request(str(i), [*range(40), 50 + i], max_tokens=1)) for i in range(8)]
        harness.run()
        assert len(harness.plans) == 1
        assert harness.model.num_tokens_computed == 41 + 7
        assert [request.num_cached_tokens for request in requests] == [0] + [40] * 7
        assert harness.scheduler.kv_cache.stats().prefix_hit_tokens == 280
        for request in requests:
            assert request.sequences[0].output_token_ids == expected(harness, request)[0]
