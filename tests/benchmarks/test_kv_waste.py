from __future__ import annotations

import statistics

import pytest

from benchmarks.kv.waste import GOAL, MAX_MODEL_LEN, lengths, measure

DEFAULT_BLOCK_SIZE = 16


def test_lengths_are_like_sharegpts() -> None:
    drawn = lengths(20_000, 0)
    assert statistics.mean(prompt for prompt, _ in drawn) == pytest.approx(161, rel=0.1)
    assert statistics.mean(output for _, output in drawn) == pytest.approx(338, rel=0.12)
    assert max(map(sum, drawn)) <= MAX_MODEL_LEN


def test_the_default_block_size_wastes_less_than_the_goal_and_whole_contexts_most() -> None:
    waste = measure(lengths(80, 1), DEFAULT_BLOCK_SIZE, max_num_seqs=32, pool_tokens=16384)
    assert 0.0 < waste.paged < GOAL
    assert 0.6 < waste.whole_context < 0.95
    assert waste.paged < waste.power_of_two < waste.whole_context


def test_one_token_per_block_wastes_nothing_and_large_blocks_much() -> None:
    requests = lengths(20, 2)
    exact, large = (measure(requests, size, max_num_seqs=32, pool_tokens=16384) for size in (1, 128))
    assert exact.paged == 0.0
    assert large.paged > 0.1


def test_what_is_counted_is_what_requests_leave_empty() -> None:
    # Two requests of 5 + 3 tokens in blocks of 4. The last token is never computed: 5, 6, 7 slots of 8 are full.
    waste = measure([(5, 3)] * 2, 4, max_num_seqs=2, pool_tokens=MAX_MODEL_LEN)
    assert waste.steps == 3
    assert waste.paged == pytest.approx(1 - (5 + 6 + 7) / (3 * 8))
    assert waste.power_of_two == pytest.approx(1 - (5 + 6 + 7) / (3 * 8))
    assert waste.whole_context == pytest.approx(1 - 6 / MAX_MODEL_LEN)
