"""Layers with windows free blocks that no query reads any more; tokens and bits are unchanged, also after a resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.layers.cuda_fusion import CudaFusion
from pagemill.engine.llm import LLM
from pagemill.engine.models import loader
from pagemill.engine.outputs import EngineStats, SampleState
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.free_blocks import poison_free_blocks
from tests.engine.models.families.native_cases import (
    GEMMA2,
    GEMMA3,
    GEMMA_NORM_MEAN,
    GPT_NEO,
    LLAMA,
    WINDOWS,
    native_checkpoint,
)
from tests.engine.models.families.tiny import TinyCheckpoint

MINISTRAL = WINDOWS | {
    "model_type": "ministral", "architectures": ["MinistralForCausalLM"], "head_dim": 16, "num_hidden_layers": 4,
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 9}
CASES: dict[str, tuple[Callable[[], TinyCheckpoint], tuple[int | None, ...]]] = {
    "gemma2": (lambda: native_checkpoint(GEMMA2, norm_mean=GEMMA_NORM_MEAN), (6, None)),
    "gemma3": (lambda: native_checkpoint(GEMMA3, norm_mean=GEMMA_NORM_MEAN), (6, 6, None)),
    "gpt_neo": (lambda: native_checkpoint(GPT_NEO), (None, 6)),
    "ministral": (lambda: native_checkpoint(MINISTRAL), (None, 6, 6, 6)),
    "mistral": (lambda: native_checkpoint(MISTRAL), (9,)),
}
OPTIONS: dict[str, Any] = {
    "num_threads": 1, "block_size": 4, "num_kv_blocks": 400, "max_num_batched_tokens": 24, "num_speculative_tokens": 0,
}  # fmt: skip
NUM_OUTPUT_TOKENS = 12
NUM_TIGHT_BLOCKS = {"gemma3": 84, "mistral": 22}


def prompts() -> list[list[int]]:
    """Longer than windows, some with a common prefix that is too."""
    rng = random.Random(3)
    made = [[rng.randrange(97) for _ in range(length)] for length in (1, 7, 40, 61, 90, 75, 33)]
    for prompt in made[-3:]:
        prompt[:30] = made[-1][:30]
    return made


def greedy(**options: Any) -> SamplingParams:
    given = {"temperature": 0.0, "max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True, "logprobs": 3}
    return SamplingParams(**(given | options))


def bits(llm: LLM, params: SamplingParams | None = None) -> list[Any]:
    """Tokens and log-probabilities, bit for bit."""
    results = llm.generate(prompts(), params or greedy(), use_tqdm=False)
    llm.engine.check_integrity()
    return [[(output.token_ids, output.logprobs) for output in result.outputs] for result in results]


def tokens(llm: LLM) -> list[list[int]]:
    return [outputs[0][0] for outputs in bits(llm)]


@pytest.fixture(params=CASES)
def case(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[TinyCheckpoint, str, tuple[int | None, ...]]:
    make, windows = CASES[request.param]
    checkpoint = make()
    return checkpoint, str(checkpoint.write(tmp_path)), windows


@pytest.mark.parametrize("how", ["compiled", "fused as on CUDA", "transformers' own"])
def test_tokens_are_transformers(
    case: tuple[TinyCheckpoint, str, tuple[int | None, ...]], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, directory, windows = case
    if how == "fused as on CUDA":
        monkeypatch.setattr(CpuBackend, "fusion", lambda _self, traits, _, make: CudaFusion(traits, make))
    elif how == "transformers' own":
        monkeypatch.setattr(CpuBackend, "fuse", lambda *_: None)
    llm = LLM(directory, **OPTIONS)
    poison_free_blocks(llm)
    got = tokens(llm)
    for prompt, output in zip(prompts(), got, strict=True):
        assert output[:2] == checkpoint.complete(prompt)[:2]
    stats = llm.engine.stats().kv
    assert tuple(window for window, _ in stats.groups) == windows
    assert stats.window_frees > 0
    assert tokens(llm) == got, "from the prefix cache"
    assert llm.engine.stats().kv.prefix_hit_tokens > 0


@pytest.mark.slow
def test_bits_are_those_of_one_group(
    case: tuple[TinyCheckpoint, str, tuple[int | None, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, again with prefix hits, forked samples, beams, and scored prompts."""
    _, directory, _ = case
    every = [
        greedy(),
        greedy(),
        greedy(n=3, temperature=1.0, seed=5),
        greedy(prompt_logprobs=2, max_tokens=2),
        greedy(beam_width=3, n=3),
    ]

    def run() -> tuple[list[Any], EngineStats]:
        llm = LLM(directory, **OPTIONS)
        poison_free_blocks(llm)
        found = [bits(llm, params) for params in every]
        return found, llm.engine.stats()

    grouped, stats = run()
    monkeypatch.setattr(loader, "layer_groups", lambda *_: ())
    single, other = run()
    assert grouped == single
    assert stats.kv.window_frees > other.kv.window_frees == 0
    assert stats.steps.finished == other.steps.finished


@pytest.mark.slow
@pytest.mark.parametrize("host_cache_gib", [0.0, 0.01])
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_bits_stay_through_preemption(name: str, host_cache_gib: float, tmp_path: Path) -> None:
    directory = str(CASES[name][0]().write(tmp_path))
    options = OPTIONS | {"batch_invariant": True, "max_num_batched_tokens": 16}
    ample = LLM(directory, **options)
    # Outputs are longer than the forecast at admission.
    tight = LLM(
        directory, **options | {"num_kv_blocks": NUM_TIGHT_BLOCKS[name], "host_cache_gib": host_cache_gib}
    )
    poison_free_blocks(tight)
    for params in (greedy(max_tokens=48), greedy(n=2, temperature=1.0, seed=5, max_tokens=48)):
        assert bits(tight, params) == bits(ample, params)
    stats = tight.engine.stats()
    assert stats.scheduler.preemptions > 0
    assert bool(stats.kv.host_loaded_blocks) == bool(host_cache_gib)


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_a_resumed_request_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    directory = str(CASES[name][0]().write(tmp_path))
    llm = LLM(directory, **OPTIONS | {"batch_invariant": True})
    expected = bits(llm)[4][0]
    other = LLM(directory, **OPTIONS | {"batch_invariant": True, "max_num_batched_tokens": 7}).engine
    for num_known in (1, 7):
        sample = SampleState(0, expected[0][:num_known])
        other.add_request("r", prompts()[4], greedy(), resume=[sample])
        found: list[Any] = []
        while other.has_unfinished():
            for output in other.step():
                found += [entry for delta in output.deltas for entry in delta.logprobs or ()]
            other.check_integrity()
        assert found == expected[1][num_known:]
    assert other.stats().kv.window_frees > 0


def test_a_pool_smaller_than_the_prompt_serves_windows_alone(tmp_path: Path) -> None:
    """One group with a window needs at most window and chunk, for a prompt of any length."""
    checkpoint = CASES["mistral"][0]()
    directory = str(checkpoint.write(tmp_path))
    llm = LLM(directory, **OPTIONS | {"num_kv_blocks": 13})
    (result,) = llm.generate([prompts()[4]], greedy(), use_tqdm=False)
    assert result.usage.prompt_tokens == 90 > 12 * 4
    assert result.outputs[0].token_ids[:2] == checkpoint.complete(prompts()[4])[:2]
    assert llm.engine.stats().steps.peak_utilization <= 1


def test_a_window_that_the_model_never_leaves_is_none(tmp_path: Path) -> None:
    directory = str(CASES["gemma2"][0]().write(tmp_path))
    llm = LLM(directory, max_model_len=6, **OPTIONS)
    assert llm.engine.stats().kv.groups == ((None, 0),)


def test_a_layer_that_reads_further_than_its_cache_keeps_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = str(CASES["gemma2"][0]().write(tmp_path))
    monkeypatch.setattr(loader, "layer_windows", lambda *_: (5, None))
    with pytest.raises(RuntimeError, match="layer 0 reads 6 keys, its cache keeps 5"):
        LLM(directory, **OPTIONS)
    monkeypatch.setattr(CpuBackend, "fuse", lambda *_: None)
    monkeypatch.setattr(loader, "layer_windows", lambda *_: (6, 100))
    llm = LLM(directory, **OPTIONS)
    (result,) = llm.generate([[1, 2, 3]], greedy(), use_tqdm=False)
    assert result.error is not None
