"""Planning a step before the tokens of the step in flight are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagemill.engine.plan import StepPlan
from pagemill.engine.scheduling.request import SequenceStatus
from tests.engine.scheduling.harness import (
    PROMPT,
    Harness,
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


@dataclass
class Outline:
    """A grammar of tokens 1, 2 and 3, which forces `forced` after the first of them."""

    forced: list[int] = field(default_factory=list)
    is_ready: bool = True
    may_sample_again: bool = True
    is_complete: bool = False
    failure: None = None
    num_advanced: int = 0

    def allowed_token_ids(self) -> list[int]:
        return [1 + self.num_advanced]

    def token_mask(self) -> None:
        return None

    def prepare(self, token_id: int) -> None: ...

    def advance(self, token_id: int) -> list[int]:
        self.num_advanced += 1
        forced, self.forced = self.forced, []
        return forced


class TestLateSamples:
    """A constrained row's next token is computed before its grammar knows the token; only its sample waits."""

    def started(self, grammar: Outline) -> tuple[Harness, StepPlan, StepPlan]:
        harness = Harness(make_config(depth=1))
        harness.add(make_request("a", PROMPT, grammar=lambda _: grammar))
        return harness, schedule(harness), schedule(harness)

    def test_the_allowed_tokens_follow_once_the_token_is_known(self) -> None:
        harness, first, second = self.started(Outline())
        assert not first.samples_later
        assert second.samples_later
        assert (second.work[0].start, second.samples[0].position) == (7, 8)
        assert second.samples[0].allowed_token_ids is None
        harness.scheduler.update(first, result(first, 1))
        assert harness.scheduler.constrain(second)
        assert second.samples[0].allowed_token_ids == [2]
        harness.scheduler.update(second, result(second, 2))
        assert harness.requests["a"].sequences[0].output_token_ids == [1, 2]

    def test_forced_tokens_replace_the_sample(self) -> None:
        harness, first, second = self.started(Outline(forced=[60, 61]))
        harness.scheduler.update(first, result(first, 1))
        assert harness.scheduler.constrain(second)
        third = schedule(harness)
        assert (third.work[0].start, third.work[0].num_tokens, third.samples[0].position) == (8, 2, 10)
        assert third.work[0].forced_token_ids == [(8, 60), (9, 61)]
        assert not third.samples_later
        assert harness.scheduler.update(second, result(second, 9)) == []
        harness.scheduler.update(third, result(third, 2))
        assert harness.requests["a"].sequences[0].output_token_ids == [1, 60, 61, 2]

    def test_a_grammar_that_is_not_ready_repeats_the_token(self) -> None:
        grammar = Outline()
        harness, first, second = self.started(grammar)
        grammar.is_ready = False
        harness.scheduler.update(first, result(first, 1))
        assert harness.scheduler.constrain(second)
        harness.check()
        assert harness.schedule() is None
        assert harness.scheduler.update(second, result(second, 9)) == []
        grammar.is_ready = True
        harness.scheduler.read_on()
        third = schedule(harness)
        assert (third.work[0].start, third.work[0].num_tokens, third.samples[0].position) == (7, 1, 8)
        assert third.samples[0].allowed_token_ids == [2]
        harness.scheduler.update(third, result(third, 2))
        assert harness.requests["a"].sequences[0].output_token_ids == [1, 2]

    def test_a_step_after_one_that_raised_samples_nothing(self) -> None:
        harness, first, second = self.started(Outline())
        harness.scheduler.recover(first)
        assert not harness.scheduler.constrain(second)
        assert harness.scheduler.update(second, result(second)) == []
        harness.check()

    def test_nothing_is_computed_for_the_last_token_of_a_structure(self) -> None:
        grammar = Outline(may_sample_again=False)
        harness = Harness(make_config(depth=1))
        harness.add(make_request("label", [1, 2, 3], grammar=lambda _: grammar))
        harness.add(make_request("free", [4, 5, 6]))
        schedule(harness)
        assert [work.row for work in schedule(harness).work] == [1]

    def test_a_recurrent_state_waits_for_the_grammar(self) -> None:
        harness = Harness(make_config(depth=1, state_bytes=1, enable_prefix_caching=False))
        harness.add(make_request("a", [1, 2, 3], grammar=lambda _: Outline()))
        schedule(harness)
        assert harness.schedule() is None
