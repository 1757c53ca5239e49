"""One model over several processes: the same tokens as in one, for any schedule."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pagemill.engine.llm import LLM, GenerationOutput
from pagemill.engine.sampling_params import BeamSearchParams, SamplingParams

pytestmark = pytest.mark.slow


VOCAB_SIZE = 61  # not a multiple of anything: the last rank has fewer tokens
SHARED = [5, 17, 42, 9, 3, 60, 33, 8, 21, 2, 50, 11, 7, 29, 31, 44, 12, 1]
PROMPTS = [SHARED[:1], SHARED, [*SHARED, 40, 41], [*SHARED, 40, 41, 55], SHARED[::-1] * 2, [9] * 33]
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.2, "ignore_eos": True}


def sizes(**more: Any) -> dict[str, Any]:
    defaults = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return defaults | more


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes(num_key_value_heads=2))),
    "llama-one-kv-head": lambda: LlamaForCausalLM(
        LlamaConfig(**sizes(num_key_value_heads=1, attention_bias=True, mlp_bias=True))
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**sizes(num_key_value_heads=2, sliding_window=12))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes(num_key_value_heads=2, tie_word_embeddings=True))),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes(num_key_value_heads=4, head_dim=16))),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**sizes(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2))
    ),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes(num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2),
            moe_intermediate_size=23,
            mlp_only_layers=[0],
        )
    ),
    "qwen3-moe-without-dense-layers": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes(num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2),
            moe_intermediate_size=24,
        )
    ),
    "glm4-moe": lambda: Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **sizes(num_key_value_heads=2, head_dim=16, n_routed_experts=4, num_experts_per_tok=2),
            moe_intermediate_size=24,
            n_group=1,
            topk_group=1,
        )
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**sizes(num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, sliding_window=12))
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**sizes())),
    "phi": lambda: PhiForCausalLM(PhiConfig(**sizes(num_key_value_heads=2))),
    "phi3": lambda: Phi3ForCausalLM(
        Phi3Config(**sizes(num_key_value_heads=2, sliding_window=12, pad_token_id=0))
    ),
}


def save(name: str, directory: Path) -> Path:
    """Random weights, wide enough that the best two tokens are rarely close."""
    torch.manual_seed(3)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(std=0.5 if parameter.ndim > 1 else 0.1)
    model.save_pretrained(directory / name)
    return directory / name


def make_llm(directory: Path, **options: Any) -> LLM:
    settings = {
        "num_kv_blocks": 128, "max_model_len": 128, "max_num_seqs": 8, "block_size": 4, "num_threads": 1,
        "device": "cpu",
    }  # fmt: skip
    return LLM(str(directory), **(settings | options))


def tokens(results: list[GenerationOutput]) -> list[list[list[int]]]:
    return [[output.token_ids for output in result.outputs] for result in results]


def generate(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[list[int]]]:
    results = llm.generate(prompts, params, use_tqdm=False)
    assert all(result.error is None for result in results)
    llm.engine.check_integrity()
    assert llm.engine.stats().kv.active_blocks == 0
    return tokens(results)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one(llama: Path) -> LLM:
    """The model in one process, with enough space for all requests together."""
    return make_llm(llama)


@pytest.fixture(scope="module")
def two(llama: Path) -> Iterator[LLM]:
    """The model in two processes, with a small pool and budget, and steps that overlap: a plan is sent before
    the tokens that it continues from are known."""
    llm = make_llm(
        llama, tensor_parallel_size=2, num_kv_blocks=40, max_num_batched_tokens=12, host_cache_gib=0.001,
        async_scheduling=True, pad_to_bucket=True,
    )  # fmt: skip
    yield llm
    llm.close()


class TestTwoRanks:
    """One pair of processes for all tests, since startup takes most of the time."""

    def test_each_has_half_of_every_layer(self, one: LLM, two: LLM) -> None:
        whole, shared = one.engine.stats(), two.engine.stats()
        embeddings = norms = VOCAB_SIZE * 32 * 4
        assert (
            whole.memory_bytes["weights"]
            <= shared.memory_bytes["weights"]
            < whole.memory_bytes["weights"] + 2 * (embeddings + norms)
        )
        assert shared.kv.block_bytes == whole.kv.block_bytes
        assert two.engine._parts.executor._runner.kv_cache.layers[0].keys.shape[1] == 1  # type: ignore[attr-defined]

    def test_prompts_in_chunks_with_shared_prefixes(self, one: LLM, two: LLM) -> None:
        params = SamplingParams(max_tokens=24, **GREEDY)
        assert generate(two, PROMPTS, params) == generate(one, PROMPTS, params)
        again = two.generate(PROMPTS, params, use_tqdm=False)
        assert sum(result.usage.cached_tokens for result in again) > 0
        assert tokens(again) == generate(one, PROMPTS, params)

    def test_seeded_samples_with_forks(self, one: LLM, two: LLM) -> None:
        params = [
            SamplingParams(max_tokens=20, n=n, seed=seed, **SAMPLED)
            for seed, n in enumerate((1, 3, 2, 1, 1, 2))
        ]
        assert generate(two, PROMPTS, params) == generate(one, PROMPTS, params)

    def test_preemption_with_a_host_tier(self, one: LLM, two: LLM) -> None:
        params = SamplingParams(max_tokens=60, **GREEDY)
        before = two.engine.stats()
        assert generate(two, PROMPTS, params) == generate(one, PROMPTS, params)
        after = two.engine.stats()
        assert after.scheduler.preemptions > before.scheduler.preemptions
        assert after.kv.host_loaded_blocks > before.kv.host_loaded_blocks

    def test_log_probabilities_of_prompt_and_output(self, one: LLM, two: LLM) -> None:
        params = SamplingParams(max_tokens=8, logprobs=3, prompt_logprobs=2, **GREEDY)
        for whole, shared in zip(
            one.generate(PROMPTS, params, use_tqdm=False),
            two.generate(PROMPTS, params, use_tqdm=False),
            strict=True,
        ):
            assert whole.prompt_logprobs is not None
            assert shared.prompt_logprobs is not None
            pairs = list(zip(whole.prompt_logprobs[1:], shared.prompt_logprobs[1:], strict=True))
            pairs += zip(whole.outputs[0].logprobs or (), shared.outputs[0].logprobs or (), strict=True)
            for a, b in pairs:
                assert a is not None
                assert b is not None
                assert a.token_id == b.token_id
                assert b.logprob == pytest.approx(a.logprob, abs=1e-3)

    def test_beams_and_forced_tokens(self, one: LLM, two: LLM) -> None:
        beams = BeamSearchParams(beam_width=3, max_tokens=10)
        prompts = PROMPTS[:3]
        assert tokens(two.beam_search(prompts, beams, use_tqdm=False)) == tokens(
            one.beam_search(prompts, beams, use_tqdm=False)
        )

    def test_what_ended_leaves_the_ranks_in_step(self, one: LLM, two: LLM) -> None:
        """An abort, then a request in the same row."""
        params = SamplingParams(max_tokens=30, **GREEDY)
        two.engine.add_request("gone", SHARED, params)
        for _ in range(6):
            two.engine.step()
        two.engine.abort("gone")
        assert generate(two, PROMPTS, params) == generate(one, PROMPTS, params)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_family_over_two_and_four_ranks(name: str, size: int, tmp_path: Path) -> None:
    directory = save(name, tmp_path)
    params = [
        SamplingParams(max_tokens=24, **GREEDY),
        SamplingParams(max_tokens=24, n=3, seed=7, **SAMPLED),
    ] * 3
    expected = generate(make_llm(directory), PROMPTS, params)
    llm = make_llm(
        directory,
        tensor_parallel_size=size,
        num_kv_blocks=56,
        max_num_batched_tokens=16,
        host_cache_gib=0.001,
    )
    try:
        assert generate(llm, PROMPTS, params) == expected
        assert generate(llm, PROMPTS, params) == expected  # now with prefixes that are cached
    finally:
        llm.close()


def test_phi3_splits_where_its_layers_stay_as_they_are(tmp_path: Path) -> None:
    """In half precision on a CPU transformers' own attention runs, which selects queries by a configuration."""
    directory = save("phi3", tmp_path)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, **GREEDY)
    found = []
    for size in (1, 2):
        llm = make_llm(directory, dtype="float16", tensor_parallel_size=size)
        results = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.close()
        scored = [entry for result in results for entry in result.prompt_logprobs or () if entry is not None]
        found.append(torch.tensor([entry.logprob for entry in scored]))
    whole, split = found
    assert (whole - split).abs().mean() < 0.1 < 1.0 < whole.std()


def test_random_weights_are_the_same_on_every_rank(llama: Path) -> None:
    params = SamplingParams(max_tokens=12, **GREEDY)
    whole = generate(make_llm(llama, load_format="dummy"), PROMPTS, params)
    llm = make_llm(llama, load_format="dummy", tensor_parallel_size=4)
    try:
        assert generate(llm, PROMPTS, params) == whole
    finally:
        llm.close()


def test_messages_are_small() -> None:
    """A step of 64 decoding rows, in bytes; prompts are sent once, and sampling data never."""
    from pagemill.engine.execution.parallel.plan_delta import decode, encode
    from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan

    work = [RowWork(row, 1000 + row, 1, [row] if row % 16 == 0 else []) for row in range(64)]
    samples = [Sample(row, row, 1001 + row, token_mask=bytes(16_000), num_candidates=4) for row in range(64)]
    message = encode(StepPlan(7, work=work, samples=samples))
    assert len(message) < 64 * 40
    plan = decode(message)
    assert (plan.step_id, plan.work) == (7, work)
    assert [(s.row, s.token_index, s.position) for s in plan.samples] == [(r, r, 1001 + r) for r in range(64)]

    params = SamplingParams(stop=["secret"], seed=1)
    new = NewRow(3, "request", 1, [1, 2, 300], 2, [9], params, 1, ((5, 6),))
    copies = {"host_stores": [(1, 2)], "host_loads": [(3, 4)], "block_copies": [(5, 6)]}
    forced = RowWork(3, 0, 3, [10], [(0, 11)], [(2, 300)], 5)
    message = encode(StepPlan(8, freed_rows=[1], new_rows=[new], work=[forced], **copies))
    assert b"secret" not in message
    assert b"request" not in message
    plan = decode(message)
    assert (plan.host_stores, plan.host_loads, plan.block_copies) == ([(1, 2)], [(3, 4)], [(5, 6)])
    assert plan.work == [forced]
    (row,) = plan.new_rows
    assert (row.row, row.token_ids, row.num_prompt_tokens, row.block_ids) == (3, [1, 2, 300], 2, [9])
    assert len(message) < len(pickle.dumps(StepPlan(8, new_rows=[new], work=[forced], **copies))) / 2
