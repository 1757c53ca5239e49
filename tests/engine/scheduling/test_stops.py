"""Ends of sequences, and intermediate tokens that grammars force."""

from __future__ import annotations

from pagemill.engine.scheduling.request import Request
from tests.engine.scheduling.harness import (
    PROMPT,
    Harness,
    ScriptGrammar,
    make_config,
    make_request,
    result,
    schedule,
)


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
        assert [entry.token_id for entry in harness.logprobs[sequence]] == sequence.output_token_ids


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
        assert [entry.logprob for entry in harness.logprobs[sequence]] == [-1.0, None, None, -1.0]

    def test_forced_tokens_stop_at_max_tokens(self) -> None:
        harness = Harness(make_config())
        grammar = ScriptGrammar(1, 9, 64)
        grammar.advance = lambda token_id: [1, 2, 3]  # type: ignore[method-assign]
        request = harness.add(make_request("a", PROMPT, max_tokens=3, grammar=lambda _: grammar))
        harness.step()
        assert request.sequences[0].output_token_ids[1:] == [1, 2]
        assert request.sequences[0].finish_reason == "length"
