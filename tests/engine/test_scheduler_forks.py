"""Samples of one request: forks off one prefill, rows, copies."""

from __future__ import annotations

from engine.scheduling.request import SequenceStatus
from tests.engine.scheduler_harness import (
    PROMPT,
    Harness,
    expected,
    make_config,
    make_request,
    result,
    schedule,
)


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
