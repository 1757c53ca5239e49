"""Samples of one request: forks off one prefill, rows, copies."""

from __future__ import annotations

from pagemill.engine.scheduling.request import SequenceStatus
from tests.engine.scheduling.harness import (
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
        # The first two to write into the shared block copy it; the third then has it alone.
        assert third.block_copies == [(2, 3), (2, 4)]
        assert [work.replaced_blocks for work in third.work] == [[(1, 3)], [(1, 4)], ()]

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


def test_the_paged_attention_article_s_story_block_by_block() -> None:
    """ "The future of artificial intelligence is", sampled twice, in blocks of four words."""
    words = ["The", "future", "of", "artificial", "intelligence", "is"]
    harness = Harness(make_config(enable_prefix_caching=False))
    request = harness.add(make_request("story", range(len(words)), n=2, temperature=1.0, max_tokens=4))
    a, b = request.sequences
    blocks = harness.scheduler.kv_cache.pool.blocks

    # One prefill writes the prompt: block 1 is full, block 2 holds "intelligence is". Both samples refer to both.
    plan = schedule(harness)
    assert (plan.num_tokens, len(plan.samples), plan.block_copies) == (6, 2, [])
    assert a.block_ids == b.block_ids == [1, 2]
    assert [blocks[block_id].ref_count for block_id in (1, 2)] == [2, 2]
    assert [blocks[block_id].num_filled for block_id in (1, 2)] == [4, 2]
    stats = harness.scheduler.kv_cache.stats()
    assert (stats.active_blocks, stats.shared_blocks, stats.filled_slots) == (2, 2, 6)
    harness.scheduler.update(plan, result(plan, 50, 60))

    # A writes its word into block 2, which B shares: it is copied to block 3, and the count falls from 2 to 1.
    # B is then alone in block 2 and writes in place.
    plan = schedule(harness)
    assert plan.block_copies == [(2, 3)]
    assert [work.replaced_blocks for work in plan.work] == [[(1, 3)], ()]
    assert (a.block_ids, b.block_ids) == ([1, 3], [1, 2])
    assert [blocks[block_id].ref_count for block_id in (1, 2, 3)] == [2, 1, 1]
    assert [blocks[block_id].num_filled for block_id in (1, 2, 3)] == [4, 3, 3]
    stats = harness.scheduler.kv_cache.stats()
    assert (stats.active_blocks, stats.shared_blocks, stats.filled_slots, stats.cow_copies) == (3, 1, 10, 1)
    harness.scheduler.update(plan, result(plan, 51, 61))

    # No more copies: each continues in its own block, and the prompt's first block stays shared to the end.
    plan = schedule(harness)
    assert (plan.block_copies, [work.replaced_blocks for work in plan.work]) == ([], [(), ()])
    harness.scheduler.update(plan, result(plan, 52, 62))
    plan = schedule(harness)
    assert blocks[1].ref_count == 2
    harness.scheduler.update(plan, result(plan, 53, 63))
    assert (a.output_token_ids, b.output_token_ids) == ([50, 51, 52, 53], [60, 61, 62, 63])
    harness.check_idle()
