"""Planning a step before the tokens of the step in flight are known."""

from __future__ import annotations

from pagemill.engine.scheduling.request import SequenceStatus
from tests.engine.scheduling.harness import (
    PROMPT,
    Harness,
    ScriptGrammar,
    make_config,
    make_request,
    result,
    schedule,
)


class TestDepthOne:
    def test_a_step_is_planned_before_the_token_it_needs_is_known(self) -> None:
        harness = Harness(make_config(depth=1))
        harness.add(make_request("a", PROMPT, max_tokens=3))
        first, second = schedule(harness), schedule(harness)
        assert (second.work[0].start, second.work[0].num_tokens) == (7, 1)
        assert second.samples[0].position == 8
        harness.scheduler.update(first, result(first, 1))
        third = schedule(harness)
        # Two known or in flight, the third planned: a fourth must not follow.
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
        assert harness.scheduler.kv_cache.stats().reserved_blocks == 1 + 2
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
