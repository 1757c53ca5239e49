"""Steps that raise: retried, blamed and void requests."""

from __future__ import annotations

from tests.engine.scheduling.harness import Harness, expected, make_config, make_request, result, schedule
from tests.engine.scheduling.hash_model import HashOracle


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
        stats = harness.scheduler.kv_cache.stats()
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
