"""The prefix cache across requests: hits, eviction order, and sharing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.engine.llm import LLM
from pagemill.engine.media import MediaItem, PromptMedia
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.kv.manager import KVCacheManager
from pagemill.engine.scheduling.request import Request
from tests.engine.scheduling.harness import Harness, make_config, make_request, schedule
from tests.engine.tiny_model import VOCAB_SIZE, save_tiny_llama


def salted(request_id: str, prompt: list[int], salt: str, **params: object) -> Request:
    request = make_request(request_id, prompt, **params)
    request.cache_salt = salt
    return request


def cached_tokens(harness: Harness, request: Request) -> int:
    harness.add(request)
    harness.run()
    return request.num_cached_tokens


def test_a_later_request_finds_the_prompt_and_the_output_of_an_earlier_one() -> None:
    harness = Harness(make_config())
    first = harness.add(make_request("first", range(10), max_tokens=9))
    harness.run()
    turn = [*range(10), *first.sequences[0].output_token_ids, 7, 8]
    assert cached_tokens(harness, make_request("second", turn)) == 16


def test_tails_are_evicted_before_the_prefixes_they_hang_on() -> None:
    harness = Harness(make_config(num_kv_blocks=9))
    harness.add(make_request("old", range(16), max_tokens=1))
    harness.run()
    # Six blocks of another request leave two of the four: the first ones are kept.
    harness.add(make_request("other", range(30, 53), max_tokens=1))
    harness.run()
    assert cached_tokens(harness, make_request("again", range(16), max_tokens=1)) == 8


def test_the_least_recently_used_goes_first() -> None:
    harness = Harness(make_config(num_kv_blocks=10))
    for name, start in (("a", 0), ("b", 20)):
        harness.add(make_request(name, range(start, start + 9), max_tokens=1))
        harness.run()
    harness.add(make_request("a again", range(9), max_tokens=1))  # a is younger than b now
    harness.run()
    harness.add(make_request("c", range(40, 64), max_tokens=1))
    harness.run()
    lookup = harness.scheduler.kv_cache.match_prefix
    assert len(lookup(make_request("x", range(9)).sequences[0]).entries) == 2
    assert len(lookup(make_request("y", range(20, 29)).sequences[0]).entries) < 2


class TestSalts:
    def test_only_the_same_salt_finds_the_prefix(self) -> None:
        harness = Harness(make_config())
        prompt = list(range(13))
        assert cached_tokens(harness, salted("a", prompt, "tenant-a")) == 0
        assert cached_tokens(harness, salted("b", prompt, "tenant-b")) == 0
        assert cached_tokens(harness, salted("none", prompt, "")) == 0
        assert cached_tokens(harness, salted("a2", prompt, "tenant-a")) == 12
        assert cached_tokens(harness, salted("b2", prompt, "tenant-b")) == 12

    def test_nor_within_one_step(self) -> None:
        harness = Harness(make_config(max_num_batched_tokens=256))
        for number, salt in enumerate(("a", "a", "b", "b", "")):
            harness.add(salted(str(number), [*range(12), 40 + number], salt, max_tokens=1))
        assert schedule(harness).num_tokens == 13 + 1 + 13 + 1 + 13

    def test_no_salt_continues_somebody_elses_chain(self) -> None:
        """A salt is hashed, so that knowing a block's digest does not permit a continuation after that block."""
        kv = KVCacheManager(num_blocks=16, block_size=4)
        victim = make_request("victim", range(9)).sequences[0]
        kv.admit(victim, kv.match_prefix(victim), step_id=0)
        assert kv.allocate_slots(victim, 9, 0) is not None
        victim.num_computed_tokens, victim.last_step_id = 9, 0
        kv.register_full_blocks(victim)
        for digest in victim.block_hashes:
            for salt in (digest.hex(), digest.decode("latin-1")):
                assert kv.match_prefix(salted("thief", [4, 5, 6, 7, 8], salt).sequences[0]).entries == []


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["depth 0", "depth 1"])
def test_hits_never_change_output(tmp_path: Path, async_scheduling: bool) -> None:
    save_tiny_llama(tmp_path)
    shared = [(5 * i) % VOCAB_SIZE for i in range(40)]
    prompts = [[*shared[:n], n % VOCAB_SIZE, 3 * n % VOCAB_SIZE] for n in (40, 40, 17, 16, 33, 40)]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=12, ignore_eos=True)

    def make(**options: object) -> LLM:
        settings = {
            "num_kv_blocks": 200,
            "block_size": 4,
            "num_threads": 1,
            "async_scheduling": async_scheduling,
        }
        return LLM(str(tmp_path), **(settings | options))

    def run(llm: LLM) -> tuple[list[list[int]], int]:
        results = llm.generate(prompts, params, use_tqdm=False)
        return [r.outputs[0].token_ids for r in results], sum(r.usage.cached_tokens for r in results)

    expected, hits = run(make(enable_prefix_caching=False))
    assert hits == 0
    llm = make()
    burst, hits_in_burst = run(llm)
    again, hits_again = run(llm)
    assert burst == again == expected
    assert hits_again > hits_in_burst > 0


@pytest.mark.slow
def test_a_prompt_of_eight_thousand_tokens_runs_in_chunks_beside_short_ones(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, max_position_embeddings=8300)
    long = [(11 * i + i // 61) % VOCAB_SIZE for i in range(8192)]
    prompts = [long, [5, 6, 7], long[:600]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = []
    for budget, threshold, caching in ((16_384, 0, False), (512, 256, True)):
        llm = LLM(
            str(tmp_path),
            num_kv_blocks=1100,
            num_threads=1,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            enable_prefix_caching=caching,
        )
        results = llm.generate(prompts, params, use_tqdm=False)
        outputs.append([result.outputs[0].token_ids for result in results])
        if budget == 512:
            assert llm.engine.stats().steps.finished > 32
        llm.engine.check_integrity()
        assert llm.engine.stats().kv.active_blocks == 0
    assert outputs[0] == outputs[1]


def test_equal_tokens_of_different_media_share_only_what_precedes_them() -> None:
    harness = Harness(make_config())

    def asked(name: str, digest: bytes, offset: int = 6) -> int:
        request = make_request(name, range(19), max_tokens=1)
        request.media = PromptMedia((MediaItem(offset, 5, digest * 32, {}),))
        return cached_tokens(harness, request)

    assert asked("first", b"a") == 0
    assert asked("same", b"a") == 16
    assert asked("other picture", b"b") == 4  # the first block has no placeholder
    assert asked("other place", b"a", offset=7) == 4
    assert cached_tokens(harness, make_request("text", range(19), max_tokens=1)) == 4
