"""The advantage for `LLM.generate` of knowing all its requests in advance: less work, and the same results."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagemill.engine.llm import LLM
from pagemill.engine.offline_order import merge_equal, rank_by_prefix
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.tiny_model import save_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SEEDED = SamplingParams(seed=7, max_tokens=8)
DRAWN = SamplingParams(max_tokens=8)


def test_equal_requests_are_those_with_equal_prompts_and_parameters_whose_output_is_certain() -> None:
    other = SamplingParams(temperature=0.0, max_tokens=9)
    again = SamplingParams(temperature=0.0, max_tokens=8)
    requests = [
        ([1, 2], GREEDY), ([1, 2], other), ((1, 2), again), ([1, 3], GREEDY), ([1, 2], DRAWN), ([1, 2], DRAWN),
        ([1, 2], SEEDED), ([1, 2], SEEDED), ([1, 2], other),
    ]  # fmt: skip
    assert merge_equal(requests) == [0, 1, 0, 3, 4, 5, 6, 6, 1]


def test_parameters_that_cannot_be_hashed_are_compared_all_the_same() -> None:
    biased = [SamplingParams(temperature=0.0, logit_bias={5: bias}) for bias in (1.0, 2.0, 1.0)]
    assert merge_equal([([1], params) for params in biased]) == [0, 1, 0]


def test_common_beginnings_stand_together_and_equal_prompts_keep_their_order() -> None:
    prompts = [[1, 1, 5], [2, 2], [1, 1], [2, 1], [1, 1, 4], [2, 2]]
    assert rank_by_prefix(prompts) == [2, 4, 0, 3, 1, 5]
    assert rank_by_prefix([]) == []


def test_equal_prompts_are_computed_once_and_everybody_gets_a_result_of_his_own() -> None:
    llm = LLM("echo")
    results = llm.generate(["twice", "once", "twice"], GREEDY, use_tqdm=False)
    assert sum(llm.engine.stats().requests.finished.values()) == 2
    assert [result.prompt for result in results] == ["twice", "once", "twice"]
    assert len({result.request_id for result in results}) == 3
    assert results[2].outputs == results[0].outputs
    results[2].outputs[0].token_ids.clear()
    assert results[0].outputs[0].text == "twice"
    assert results[0].outputs[0].token_ids


def test_draws_without_a_seed_are_never_merged() -> None:
    llm = LLM("echo")
    llm.generate(["same", "same"], DRAWN, use_tqdm=False)
    assert sum(llm.engine.stats().requests.finished.values()) == 2


def test_a_pool_too_small_for_two_prefixes_computes_each_of_them_once() -> None:
    prompts = [[1 + number % 4] * 64 + [10 + number] for number in range(24)]
    llm = LLM("echo", num_kv_blocks=14, max_num_seqs=2, max_model_len=100)
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    # 4 prefixes of 4 blocks; every other prompt adds one token, next to the tokens that are generated.
    assert llm.engine.stats().steps.computed_tokens <= 4 * 64 + 24 * 2


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_real_model_says_the_same_as_one_request_at_a_time(params: SamplingParams, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    llm = LLM(str(tmp_path), num_kv_blocks=32, skip_tokenizer_init=True)
    prompts = [[5, 6, 7] * 8, [9, 4], [5, 6, 7] * 8, [5, 6, 7] * 7 + [8]]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]
