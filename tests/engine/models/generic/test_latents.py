"""Latent attention over a cache of latents: transformers' tokens and logits, regardless of the blocks."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.figures import read_figures
from pagemill.engine.llm import LLM
from pagemill.engine.models.families import generic
from pagemill.engine.outputs import SampleState
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.free_blocks import poison_free_blocks
from tests.engine.models.generic.tiny_configs import VOCAB_SIZE, tiny_config
from tests.engine.models.generic.trial import build, write_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0,
        "beta_fast": 32, "beta_slow": 1}  # fmt: skip
LITE: dict[str, Any] = {
    "q_lora_rank": None,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "V2": ("deepseek_v2", {}),
    "V2 Lite": ("deepseek_v2", LITE),
    "V3": (
        "deepseek_v3",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2,
         "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "dense": ("deepseek_v3", {"first_k_dense_replace": 2, "rope_interleave": False, "q_lora_rank": None}),
    "wide": ("deepseek_v3", {"first_k_dense_replace": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "head_dim": 16}),
    "GLM 4.7 Flash": ("glm4_moe_lite", {}),
    "MiniCPM 3": ("minicpm3", {}),
}  # fmt: skip
ALWAYS = ("V2 Lite", "V3")
OPTIONS: dict[str, Any] = {
    "num_threads": 1, "block_size": 4, "num_kv_blocks": 400, "max_num_batched_tokens": 24, "num_speculative_tokens": 0,
}  # fmt: skip
NUM_TOKENS = 12
NEAR = 2e-3
"""Log-probabilities of weights that differ widely: sums in another order."""
DSV2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1,
    "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "topk_group": 1, "topk_method": "greedy",
    "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip


class Case:
    """A tiny checkpoint, and the module that transformers loads from it."""

    def __init__(self, name: str, directory: Path) -> None:
        model_type, fields = CASES[name]
        config = tiny_config(model_type, 0) | fields
        self.directory = str(directory)
        self.module = write_checkpoint(build(model_type, config), directory)[0]
        self.config = self.module.config

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        return (
            self.module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)
        )

    def load(self, **options: Any) -> LLM:
        return LLM(self.directory, **OPTIONS | options)


class Cases(dict[str, Case]):
    """Each is written on a test's request."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self._factory = factory

    def __missing__(self, name: str) -> Case:
        self[name] = case = Case(name, self._factory.mktemp("latent"))
        return case


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory)


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in CASES]
)
def case(request: pytest.FixtureRequest, cases: Cases) -> Case:
    return cases[request.param]


def prompts() -> list[list[int]]:
    """With lengths around the block size and the token budget, some with a common prefix."""
    rng = random.Random(5)
    made = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 4, 25, 40, 33, 61)]
    for prompt in made[-3:]:
        prompt[:21] = made[-1][:21]
    return made


def params(**options: Any) -> SamplingParams:
    given = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 1}
    return SamplingParams(**(given | options))


def outputs(llm: LLM, settings: SamplingParams | None = None) -> list[list[list[int]]]:
    """The tokens of every sample of every prompt."""
    results = llm.generate(prompts(), settings or params(), use_tqdm=False)
    llm.engine.check_integrity()
    assert all(result.error is None for result in results)
    return [[output.token_ids for output in result.outputs] for result in results]


@pytest.mark.slow
def test_logits_are_transformers(case: Case) -> None:
    """Of prompts in chunks and of tokens from the cache, and again from the prefix cache."""
    llm = case.load()
    poison_free_blocks(llm)
    settings = params(prompt_logprobs=0)
    for prompt, result in zip(prompts(), llm.generate(prompts(), settings, use_tqdm=False), strict=True):
        output = result.outputs[0]
        expected = case.logprobs(prompt + output.token_ids)
        entries = [*(result.prompt_logprobs or [])[1:], *(output.logprobs or [])]
        scored = [entry.logprob for entry in entries if entry is not None]
        assert len(scored) == len(prompt) - 1 + NUM_TOKENS
        for place, (token, entry) in enumerate(zip((prompt + output.token_ids)[1:], scored, strict=True)):
            assert entry == pytest.approx(float(expected[place, token]), abs=NEAR)
    first = outputs(llm)
    assert outputs(llm) == first
    assert llm.engine.stats().kv.prefix_hit_tokens > 0


@pytest.mark.slow
def test_a_token_takes_the_bytes_of_its_latents(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagemill.engine"):
        llm = case.load()
    config, kv = case.config, llm.engine.stats().kv
    cached = config.kv_lora_rank + config.qk_rope_head_dim
    assert kv.block_bytes == 2 * 4 * 4 * cached  # layers, tokens, bytes
    executor: Any = llm.engine._parts.executor
    assert [tuple(tensor.shape) for layer in executor.kv_cache.layers for tensor in layer.tensors()] == 2 * [
        (400, 1, 4, cached)
    ]
    expanded = 2 * 4 * config.num_attention_heads * (
        config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    )  # fmt: skip
    assert (
        f"latents in place of keys and values: {2 * 4 * cached} bytes per token instead of {expanded}"
        in caplog.text
    )
    scaled = case.load(kv_cache_dtype="int8").engine.stats().kv
    assert scaled.block_bytes == 2 * 4 * (cached + 4)
    figures = read_figures(EngineConfig(model=case.directory, block_size=4), on_card=False)
    assert (figures.block_bytes, figures.expanded_block_bytes) == (kv.block_bytes, 4 * expanded)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["V2 Lite", "V3"])
def test_tokens_are_those_of_a_cache_of_keys_and_values(
    name: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, forked samples, beams, and a pool that is far too small for them."""
    every = [params(), params(n=3, temperature=1.0, seed=5), params(beam_width=3, n=3)]
    case = cases[name]
    latent = case.load()
    poison_free_blocks(latent)
    found = [outputs(latent, settings) for settings in every]
    assert latent.engine.stats().kv.cow_copies > 0
    monkeypatch.setattr(generic, "_with_latents", lambda _module, seen: seen)
    expanded = case.load()
    assert expanded.engine.stats().kv.block_bytes > 3 * latent.engine.stats().kv.block_bytes
    assert [outputs(expanded, settings) for settings in every] == found


@pytest.mark.slow
@pytest.mark.parametrize("host_cache_gib", [0.0, 0.01], ids=["recompute", "host tier"])
@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
def test_tokens_stay_through_preemption(host_cache_gib: float, cache_dtype: str, cases: Cases) -> None:
    case, options = cases["wide"], {"kv_cache_dtype": cache_dtype}
    ample = case.load(**options)
    tight = case.load(**options, num_kv_blocks=40, host_cache_gib=host_cache_gib)
    if cache_dtype == "float32":
        poison_free_blocks(tight)
    for settings in (params(max_tokens=40), params(n=2, temperature=1.0, seed=5, max_tokens=40)):
        assert outputs(tight, settings) == outputs(ample, settings)
    stats = tight.engine.stats()
    assert stats.scheduler.preemptions > 0
    assert bool(stats.kv.host_loaded_blocks) == bool(host_cache_gib)


def test_a_resumed_request_goes_on(case: Case) -> None:
    expected = outputs(case.load())[3][0]
    engine = case.load(max_num_batched_tokens=7).engine
    for num_known in (1, 7):
        found = expected[:num_known]
        engine.add_request("r", prompts()[3], params(), resume=[SampleState(0, list(found))])
        while engine.has_unfinished():
            for output in engine.step():
                found += [token for delta in output.deltas for token in delta.token_ids]
            engine.check_integrity()
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"dtype": "float16"}, {"kv_cache_dtype": "int8"}],
    ids=str,
)
@pytest.mark.parametrize("name", ["V2 Lite", "wide"])
def test_other_numbers_stay_near(name: str, options: dict[str, Any], cases: Cases) -> None:
    """Startup compares the logits with transformers' own."""
    assert len(outputs(cases[name].load(**options))[0][0]) == NUM_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "latent", "expanded"),
    [
        (DSV2_LITE, 27 * 576 * 2, 27 * 16 * 320 * 2),
        (DSV2_LITE | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61,
                      "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168, "q_lora_rank": 1536,
                      "n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
         61 * 576 * 2, 61 * 128 * 320 * 2),
    ],
    ids=["V2 Lite", "V3"],
)  # fmt: skip
def test_published_sizes(fields: dict[str, Any], latent: int, expanded: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = EngineConfig(model=str(tmp_path), dtype="bfloat16", block_size=16)
    figures = read_figures(config, on_card=False)
    assert (figures.block_bytes, figures.expanded_block_bytes) == (16 * latent, 16 * expanded)
    on_card = read_figures(config, on_card=True)  # values as wide as keys
    assert (on_card.block_bytes, on_card.expanded_block_bytes) == (16 * expanded * 384 // 320, None)
