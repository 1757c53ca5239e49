"""What the scheduler decides, one rule a test: order, budget, admission, preemption, forks, stops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import InvalidRequest, NeverFits
from engine.plan import StepPlan, StepResult
from engine.scheduling.request import Request, SequenceStatus
from tests.engine.hash_model import HashOracle
from tests.engine.scheduler_harness import Harness, ScriptGrammar, make_config, make_request

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def result(plan: StepPlan, *token_ids: int, invalid: frozenset[int] = frozenset()) -> StepResult:
    return StepResult(plan.step_id, [[token] for token in token_ids], invalid=invalid)


def tokens_by_row(plan: StepPlan) -> dict[int, int]:
    return {work.row: work.num_tokens for work in plan.work}


def expected(harness: Harness, request: Request, index: int = 0) -> tuple[list[int], str]:
    limit = len(request.prompt_token_ids) + request.max_tokens
    return harness.oracle.generate(request.prompt_token_ids, request.params, request.seed, index, limit)


def schedule(harness: Harness) -> StepPlan:
    plan = harness.schedule()
    assert plan is not None
    return plan


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
        # 8 prompt tokens in 2 shared blocks, and each sample's 4 + 1 further slots in 2 of its own.
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
        assert harness.scheduler.kv_stats().prefix_hit_tokens == 280
        for request in requests:
            assert request.sequences[0].output_token_ids == expected(harness, request)[0]


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
        # Each shortage is one block; a second victim in the same step would have been one too many.
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
        # Two blocks are left, "old" wants three: it waits for the victim's, which the step in flight names.
        assert harness.schedule() is None
        assert harness.scheduler.kv_stats().free_blocks == 2
        harness.scheduler.update(second, result(second, 1, 1))
        assert youngest.sequences[0].finish_reason == "length"
        assert tokens_by_row(schedule(harness)) == {0: 3, 1: 1}


class TestForks:
    def test_samples_fork_off_one_prefill_in_the_step_that_completes_it(self) -> None:
        harness = Harness(make_config(max_num_batched_tokens=4))
        harness.add(make_request("a", PROMPT, n=3, temperature=1.0))
        first = schedule(harness)
        assert (len(first.new_rows), len(first.samples)) == (1, 0)
        harness.scheduler.update(first, result(first))
        second = schedule(harness)
        assert second.num_tokens == 3
        assert [(new.row, new.sample_index, new.block_ids, new.token_ids) for new in second.new_rows] == [
            (1, 1, [1, 2], PROMPT),
            (2, 2, [1, 2], PROMPT),
        ]
        assert [(s.row, s.token_index, s.position) for s in second.samples] == [
            (0, 2, 7),
            (1, 2, 7),
            (2, 2, 7),
        ]
        harness.scheduler.update(second, result(second, 1, 2, 3))
        third = schedule(harness)
        # The first two to write into the shared block copy it; the third is then alone in it.
        assert third.block_copies == [(2, 3), (2, 4)]
        assert [work.replaced_blocks for work in third.work] == [[(1, 3)], [(1, 4)], []]

    def test_two_requests_do_not_wait_for_each_others_rows(self) -> None:
        harness = Harness(make_config(max_num_seqs=3, max_num_batched_tokens=4))
        requests = [harness.add(make_request(name, PROMPT, n=3, temperature=1.0)) for name in "ab"]
        harness.step()
        assert harness.scheduler.capacity().free_rows == 0
        assert harness.scheduler.num_running == 1
        harness.run()
        for request in requests:
            assert [s.output_token_ids for s in request.sequences] == [
                expected(harness, request, index)[0] for index in range(3)
            ]

    def test_resumed_samples_that_differ_prefill_on_their_own(self) -> None:
        harness = Harness(make_config())
        request = make_request("a", PROMPT, n=3, temperature=1.0)
        whole = [harness.oracle.generate(PROMPT, request.params, 0, index, 15)[0] for index in range(3)]
        for sequence, known in zip(request.sequences, (8, 3, 0), strict=True):
            sequence.output_token_ids = whole[sequence.index][:known]
        request.sequences[0].status, request.sequences[0].finish_reason = SequenceStatus.FINISHED, "length"
        harness.add(request)
        harness.run()
        assert [s.output_token_ids for s in request.sequences] == whole
        assert {new.sample_index for plan in harness.plans for new in plan.new_rows} == {1, 2}


class TestStops:
    def one_step(self, token: int, **params: object) -> tuple[Request, Harness]:
        harness = Harness(make_config(eos_token_ids=(2,)))
        request = harness.add(make_request("a", PROMPT, **params))
        plan = schedule(harness)
        (update,) = harness.scheduler.update(plan, result(plan, token))
        assert update.new_token_ids == [token]
        harness.check()
        return request, harness

    def test_eos_is_appended_and_ends(self) -> None:
        request, harness = self.one_step(2)
        sequence = request.sequences[0]
        assert (sequence.output_token_ids, sequence.finish_reason, sequence.stop_reason) == (
            [2],
            "stop",
            None,
        )
        assert not harness.scheduler.has_unfinished()
        harness.check_idle()

    def test_eos_can_be_ignored(self) -> None:
        assert self.one_step(2, ignore_eos=True)[0].sequences[0].finish_reason is None

    def test_a_stop_token_names_itself(self) -> None:
        sequence = self.one_step(9, stop_token_ids=(9,))[0].sequences[0]
        assert (sequence.output_token_ids, sequence.finish_reason, sequence.stop_reason) == ([9], "stop", 9)

    def test_nothing_stops_before_min_tokens(self) -> None:
        assert self.one_step(2, min_tokens=2)[0].sequences[0].finish_reason is None

    def test_max_tokens_and_the_context_end_in_length(self) -> None:
        assert self.one_step(7, max_tokens=1)[0].sequences[0].finish_reason == "length"
        harness = Harness(make_config(max_model_len=8))
        request = harness.add(make_request("a", PROMPT, max_tokens=50))
        harness.run()
        assert (len(request.sequences[0].output_token_ids), request.sequences[0].finish_reason) == (
            1,
            "length",
        )

    def test_a_stop_string_found_outside_frees_everything(self) -> None:
        request, harness = self.one_step(7)
        harness.scheduler.finish_sequence(request.sequences[0], "stop", "END")
        harness.scheduler.finish_sequence(request.sequences[0], "length")
        assert (request.sequences[0].finish_reason, request.sequences[0].stop_reason) == ("stop", "END")
        harness.check_idle()

    def test_abort_ends_every_sample_and_unknown_ids_are_nothing(self) -> None:
        harness = Harness(make_config())
        harness.add(make_request("a", PROMPT, n=2, temperature=1.0))
        harness.step()
        assert [update.sequence.finish_reason for update in harness.abort("a")] == ["abort", "abort"]
        assert harness.abort("a") == harness.abort("nobody") == []
        harness.check_idle()

    def test_aborting_the_leader_of_a_fork_before_it_forked_gives_the_rows_back(self) -> None:
        harness = Harness(make_config(max_num_batched_tokens=4))
        harness.add(make_request("a", PROMPT, n=3, temperature=1.0))
        harness.step()
        assert len(harness.abort("a")) == 3
        assert harness.scheduler.capacity().free_rows == 8
        harness.check_idle()

    def test_invalid_logits_fail_the_request_alone_and_poison_no_prefix(self) -> None:
        harness = Harness(make_config())
        harness.add(make_request("bad", range(9)))
        harness.add(make_request("good", range(20, 29)))
        plan = schedule(harness)
        updates = harness.scheduler.update(plan, result(plan, 1, 1, invalid=frozenset({0})))
        assert [(u.sequence.request.request_id, u.error_code) for u in updates] == [
            ("bad", "output_invalid"),
            ("good", None),
        ]
        assert updates[0].sequence.finish_reason == "error"
        again = harness.add(make_request("again", range(9)))
        schedule(harness)
        assert again.num_cached_tokens == 0

    def test_logprobs_follow_the_tokens(self) -> None:
        harness = Harness(make_config())
        request = harness.add(make_request("a", PROMPT, logprobs=0))
        harness.run()
        sequence = request.sequences[0]
        assert sequence.logprobs is not None
        assert [entry.token_id for entry in sequence.logprobs] == sequence.output_token_ids


class TestGrammar:
    def test_forced_tokens_are_computed_not_sampled_and_have_no_logprob(self) -> None:
        class Forcing(ScriptGrammar):
            def allowed_token_ids(self) -> list[int]:
                return [30]

            def advance(self, token_id: int) -> list[int]:
                self._left -= 1
                return [31, 32] if self._left == 1 else []

        harness = Harness(make_config())
        request = harness.add(make_request("a", PROMPT, logprobs=0, grammar=lambda _: Forcing(0, 2, 64)))
        harness.step()
        assert harness.plans[0].samples[0].allowed_token_ids == [30]
        sequence = request.sequences[0]
        assert sequence.output_token_ids == [30, 31, 32]
        harness.run()
        assert harness.plans[1].work[0].num_tokens == 3
        assert harness.plans[1].work[0].forced_token_ids == [(8, 31), (9, 32)]
        assert (sequence.output_token_ids, sequence.finish_reason) == ([30, 31, 32, 30], "stop")
        assert sequence.logprobs is not None
        assert [entry.logprob for entry in sequence.logprobs] == [-1.0, None, None, -1.0]

    def test_forced_tokens_stop_at_max_tokens(self) -> None:
        harness = Harness(make_config())
        grammar = ScriptGrammar(1, 9, 64)
        grammar.advance = lambda token_id: [1, 2, 3]  # type: ignore[method-assign]
        request = harness.add(make_request("a", PROMPT, max_tokens=3, grammar=lambda _: grammar))
        harness.step()
        assert request.sequences[0].output_token_ids[1:] == [1, 2]
        assert request.sequences[0].finish_reason == "length"


class TestDepthOne:
    def test_a_step_is_planned_before_the_token_it_needs_is_known(self) -> None:
        harness = Harness(make_config(depth=1))
        harness.add(make_request("a", PROMPT, max_tokens=3))
        first, second = schedule(harness), schedule(harness)
        assert (second.work[0].start, second.work[0].num_tokens) == (7, 1)
        assert second.samples[0].position == 8
        harness.scheduler.update(first, result(first, 1))
        third = schedule(harness)
        # Two known or in flight, the third planned: no fourth may follow.
        harness.scheduler.update(second, result(second, 1))
        assert harness.schedule() is None
        (update,) = harness.scheduler.update(third, result(third, 1))
        assert update.sequence.finish_reason == "length"

    def test_a_stop_found_late_discards_the_extra_token_and_defers_the_blocks(self) -> None:
        harness = Harness(make_config(depth=1, eos_token_ids=(2,)))
        request = harness.add(make_request("a", PROMPT))
        first, second = schedule(harness), schedule(harness)
        harness.scheduler.update(first, result(first, 2))
        assert not harness.scheduler.has_unfinished()
        assert harness.scheduler.kv_stats().reserved_blocks == 1 + 2
        assert harness.scheduler.update(second, result(second, 3)) == []
        assert request.sequences[0].output_token_ids == [2]
        assert harness.scheduler.stats().discarded_tokens == 1
        harness.check_idle()

    def test_a_grammar_waits_for_its_own_token_and_others_do_not(self) -> None:
        harness = Harness(make_config(depth=1))
        harness.add(make_request("grammar", [1, 2, 3], grammar=lambda _: ScriptGrammar(0, 5, 64)))
        harness.add(make_request("free", [4, 5, 6]))
        schedule(harness)
        assert [work.row for work in schedule(harness).work] == [1]

    def test_the_token_in_flight_of_a_preempted_sequence_counts(self) -> None:
        harness = Harness(make_config(depth=1, num_kv_blocks=6, enable_prefix_caching=False))
        harness.add(make_request("old", range(7), max_tokens=10))
        young = harness.add(make_request("young", range(7), max_tokens=10)).sequences[0]
        plans = [schedule(harness)]
        while young.row is not None:
            plan = harness.schedule()
            plans += [plan] if plan is not None else []
            if young.row is not None:
                oldest = plans.pop(0)
                harness.scheduler.update(oldest, result(oldest, *[9] * len(oldest.samples)))
        assert young.num_pending_tokens == 1
        known = len(young.output_token_ids)
        harness.scheduler.update(plans[0], result(plans[0], *[9] * len(plans[0].samples)))
        assert (young.num_pending_tokens, len(young.output_token_ids)) == (0, known + 1)
        assert young.status is SequenceStatus.WAITING
        harness.check()


class TestRecovery:
    def harness(self, **changes: object) -> Harness:
        return Harness(make_config(**changes), HashOracle(vocab_size=32))

    def test_a_failed_step_is_retried_and_every_suspect_gets_a_step_of_its_own(self) -> None:
        harness = self.harness()
        requests = [harness.add(make_request(name, [ord(name), 1, 2])) for name in "abc"]
        harness.model.bad_steps = {2}
        harness.run()
        assert [len(plan.work) for plan in harness.plans][2:7] == [3, 1, 1, 1, 3]
        assert [request.num_step_failures for request in requests] == [1, 1, 1]
        assert harness.scheduler.stats().steps_failed == 1
        for request in requests:
            assert request.sequences[0].output_token_ids == expected(harness, request)[0]

    def test_the_one_that_raises_alone_fails_alone(self) -> None:
        harness = self.harness()
        requests = [harness.add(make_request(name, [ord(name), 1, 2])) for name in "abc"]
        harness.model.bad_tokens = frozenset({ord("b")})
        harness.run()
        assert harness.errors == {"b": "engine_error"}
        assert [request.sequences[0].finish_reason for request in requests] == ["length", "error", "length"]

    def test_a_failed_step_leaves_no_prefix_behind(self) -> None:
        harness = self.harness()
        request = harness.add(make_request("a", range(20)))
        harness.model.bad_steps = {0}
        harness.step()
        stats = harness.scheduler.kv_stats()
        assert (stats.cached_blocks, stats.active_blocks) == (0, 0)
        harness.run()
        assert harness.plans[1].num_tokens == 20
        assert request.sequences[0].output_token_ids == expected(harness, request)[0]

    def test_steps_planned_on_a_failed_one_are_void_and_blame_nobody_else(self) -> None:
        harness = self.harness(depth=1)
        harness.add(make_request("a", [1, 2, 3]))
        first = schedule(harness)
        late = harness.add(make_request("b", [4, 5, 6]))
        second = schedule(harness)
        assert harness.scheduler.request_ids(first) == ["a"]
        assert harness.scheduler.request_ids(second) == ["a", "b"]
        harness.scheduler.recover(first)
        assert harness.scheduler.request_ids(second) == []
        assert harness.scheduler.update(second, result(second, 9, 9)) == []
        assert late.num_step_failures == 0
        assert late.sequences[0].output_token_ids == []
        assert harness.scheduler.num_waiting == 2

    def test_a_step_that_could_not_be_launched_spares_the_one_in_flight(self) -> None:
        harness = self.harness(depth=1)
        request = harness.add(make_request("a", [1, 2, 3]))
        first, second = schedule(harness), schedule(harness)
        harness.scheduler.recover(second)
        harness.scheduler.update(first, result(first, 7))
        assert request.sequences[0].output_token_ids == [7]
        harness.check()
        assert schedule(harness).new_rows[0].token_ids == [1, 2, 3, 7]

    def test_both_steps_in_flight_may_fail(self) -> None:
        harness = self.harness(depth=1)
        request = harness.add(make_request("a", [1, 2, 3]))
        first, second = schedule(harness), schedule(harness)
        harness.scheduler.recover(second)
        harness.scheduler.recover(first)
        assert request.sequences[0].num_pending_tokens == 0
        assert schedule(harness).num_tokens == 3
