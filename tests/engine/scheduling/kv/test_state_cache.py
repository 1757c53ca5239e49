"""Cached states of recurrent layers: when they are kept, found, evicted and dropped."""

from __future__ import annotations

import pytest

from pagemill.engine.scheduling.request import Request
from tests.engine.scheduling.harness import Harness, make_config, make_request

INSTRUCTION = list(range(40))
"""Ten blocks of four."""


def recurrent(num_cached_states: int = 16, **changes: object) -> Harness:
    return Harness(make_config(**({"state_bytes": 1, "num_cached_states": num_cached_states} | changes)))


def job(number: int, num_own: int = 6, **params: object) -> Request:
    own = [45 + number, *range(num_own - 1)]
    return make_request(f"job {number}", INSTRUCTION + own, **({"max_tokens": 1} | params))


def run(harness: Harness, *requests: Request) -> list[int]:
    """Run requests together; returns the prompt tokens of each that were not computed."""
    for request in requests:
        harness.add(request)
    harness.run()
    return [request.num_cached_tokens for request in requests]


@pytest.mark.parametrize("together", [False, True])
def test_a_shared_instruction_is_computed_until_two_prompts_differ_after_it(together: bool) -> None:
    """The second prompt shows where they differ and leaves a state there; in a burst, the others wait for it."""
    harness = recurrent(max_num_batched_tokens=200)
    jobs = [job(number) for number in range(8)]
    if together:
        cached = run(harness, *jobs)
    else:
        cached = [tokens for each in jobs for tokens in run(harness, each)]
    assert cached == [0, 0, *[40] * 6]
    assert harness.model.num_tokens_computed == 2 * 40 + 8 * 6
    assert harness.scheduler.kv_cache.stats().prefix_hit_tokens == 6 * 40


def test_a_conversation_continues_from_the_end_of_its_last_prompt() -> None:
    harness = recurrent()
    first = make_request("first", range(10), max_tokens=9)
    assert run(harness, first) == [0]
    turn = [*range(10), *first.sequences[0].output_token_ids, 7, 8]
    assert run(harness, make_request("second", turn)) == [8]
    assert run(harness, make_request("again", turn)) == [20]


def test_the_least_recently_used_state_is_evicted() -> None:
    harness = recurrent(num_cached_states=2)
    for number in range(
        6
    ):  # each leaves one at the end of its prompt; the instruction's is used all the time
        cached = run(harness, job(number))
        assert harness.scheduler.kv_cache.stats().cached_state_slots == min(2, number + 1)
    assert cached == [40]
    assert run(harness, job(5)) == [44], "the newest is still there"
    assert run(harness, job(0)) == [40], "an old one is not"


def test_a_state_is_dropped_with_its_block() -> None:
    harness = recurrent(num_kv_blocks=14)
    run(harness, job(0), job(1))
    assert harness.scheduler.kv_cache.stats().cached_state_slots > 0
    run(harness, make_request("other", range(100, 152), max_tokens=1))  # takes every block
    assert harness.scheduler.kv_cache.stats().cached_state_slots == 1
    assert run(harness, job(0)) == [0]


def test_tenants_do_not_share_states() -> None:
    harness = recurrent()
    jobs = [job(number) for number in range(4)]
    jobs[3].cache_salt = "another"
    assert [tokens for each in jobs for tokens in run(harness, each)] == [0, 0, 40, 0]


def test_a_preempted_sequence_resumes_from_the_end_of_its_prompt() -> None:
    harness = recurrent(num_kv_blocks=17, max_num_seqs=2)
    jobs = [make_request(str(number), range(number, number + 21), max_tokens=20) for number in (0, 30)]
    run(harness, *jobs)
    stats = harness.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.recomputed_tokens == stats.preempted_tokens - 20 * stats.preemptions
