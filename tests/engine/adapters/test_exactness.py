"""Adapters in a batch against PEFT's merged models, token for token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.adapters.trained import Trained, merged_tokens, save_adapter
from tests.engine.tiny_model import save_tiny_gpt2, save_tiny_llama

pytestmark = pytest.mark.slow

PROMPTS = ([5, 9, 2, 40, 17], [33, 8], [60, 11, 4, 22, 19, 50, 6, 13])
NUM_TOKENS = 20
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def generated(llm: LLM, prompts: list[list[int]], names: list[str | None]) -> list[list[int]]:
    outputs = llm.generate(prompts, PARAMS, adapter=names, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.outputs[0].token_ids for output in outputs]


def assert_as_merged(model: Path, adapters: dict[str, Path], **options: object) -> None:
    """Every adapter and no adapter in one batch."""
    llm = LLM(
        str(model),
        adapters=tuple(f"{name}={path}" for name, path in adapters.items()),
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        **options,
    )
    names = [None, *adapters]
    pairs = [(list(prompt), name) for prompt in PROMPTS for name in names]
    found = generated(llm, [prompt for prompt, _ in pairs], [name for _, name in pairs])
    wanted = {
        name: merged_tokens(model, None if name is None else adapters[name], PROMPTS, NUM_TOKENS)
        for name in names
    }
    expected = [wanted[name][number] for number in range(len(PROMPTS)) for name in names]
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) > len(PROMPTS), "the adapters change nothing"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_llama(directory)
    return directory


def test_ranks_and_scales_in_one_batch(llama: Path, tmp_path: Path) -> None:
    trained = {
        "r8": Trained(rank=8),
        "r64": Trained(rank=64, seed=1),
        "rslora": Trained(rank=16, seed=2, options={"use_rslora": True, "lora_alpha": 8}),
        "alpha": Trained(rank=16, seed=3, options={"lora_alpha": 40}),
        "few": Trained(rank=24, targets=("q_proj", "v_proj"), seed=4, std=1.0),
        "patterns": Trained(
            seed=5,
            options={
                "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 12},
                "alpha_pattern": {"q_proj": 5},
            },
        ),
    }
    adapters = {name: save_adapter(llama, tmp_path / name, one) for name, one in trained.items()}
    assert_as_merged(llama, adapters)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8},
        {"async_scheduling": True, "pad_to_bucket": True, "stage_inputs": True},
        {"adapter_slots": 1},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_any_schedule(llama: Path, tmp_path: Path, options: dict[str, object]) -> None:
    adapters = {
        name: save_adapter(llama, tmp_path / name, Trained(rank=rank, seed=rank))
        for name, rank in (("a", 8), ("b", 16))
    }
    assert_as_merged(llama, adapters, **options)


def test_gpt2(tmp_path: Path) -> None:
    save_tiny_gpt2(tmp_path / "gpt2")
    trained = {
        "attention": Trained(targets=("c_attn",), std=1.0, options={"fan_in_fan_out": True}),
        "all": Trained(rank=16, targets=("c_attn", "c_proj", "c_fc"), options={"fan_in_fan_out": True}),
    }
    adapters = {name: save_adapter(tmp_path / "gpt2", tmp_path / name, one) for name, one in trained.items()}
    assert_as_merged(tmp_path / "gpt2", adapters)


def test_bfloat16_products(llama: Path, tmp_path: Path) -> None:
    """Adapters are added in fp32: the results differ from fp32's by less than an adapter's effect."""
    adapter = save_adapter(llama, tmp_path / "adapter")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    def scored(dtype: str, name: str | None) -> torch.Tensor:
        llm = LLM(
            str(llama),
            dtype=dtype,
            adapters=(f"tuned={adapter}",),
            skip_tokenizer_init=True,
            num_kv_blocks=64,
        )
        prompts = [list(prompt) for prompt in PROMPTS]
        results = llm.generate(prompts, params, adapter=[name] * len(prompts), use_tqdm=False)
        entries = [entry for result in results for entry in result.prompt_logprobs or () if entry is not None]
        return torch.tensor([entry.logprob for entry in entries])

    exact, rounded = scored("float32", "tuned"), scored("bfloat16", "tuned")
    moved, wrong = (exact - scored("float32", None)).abs().mean(), (exact - rounded).abs().mean()
    assert 0 < wrong < moved / 3
