"""8-bit weights and caches: the products against exact integers, and what an engine makes of the options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.kv_cache import KVCacheShape, num_blocks_for
from engine.execution.quantization import Int8Linear, quantise_rows
from engine.llm import LLM
from engine.sampling_params import SamplingParams
from kernels import cpu_quantize
from kernels.layer_cache import FP8

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def make_llm(directory: str, **options: Any) -> LLM:
    defaults = {"kv_cache_memory_bytes": 2**20, "load_format": "dummy", "skip_tokenizer_init": True}
    return LLM(directory, **{**defaults, **options})


@pytest.mark.parametrize("size", [7, 64, 576])
@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_rows_are_quantised_to_nearest_with_a_scale_each(num_rows: int, size: int) -> None:
    torch.manual_seed(42)
    x = torch.randn(num_rows, size + 1)[:, 1:] * torch.rand(num_rows, 1) * 9
    x[0] = 0.0
    numbers, scales = cpu_quantize.quantise_rows(x)
    assert numbers.dtype is torch.uint8
    torch.testing.assert_close(scales[1:], x[1:].abs().amax(1) / 127, rtol=1e-6, atol=0)
    restored = (numbers.float() - cpu_quantize.ZERO_POINT) * scales[:, None]
    assert ((restored - x).abs() <= scales[:, None] * 0.50001).all()
    assert (numbers[0] == cpu_quantize.ZERO_POINT).all()


@pytest.mark.parametrize("num_rows", [1, 2, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_exact_in_integers(num_rows: int, has_bias: bool) -> None:
    torch.manual_seed(42)
    weight, x = torch.randn(96, 80), torch.randn(1, num_rows, 80)
    bias = torch.randn(96) if has_bias else None
    numbers, scales = cpu_quantize.quantise_rows(x[0])
    weight_numbers, weight_scales = quantise_rows(weight)
    exact = (numbers.long() - cpu_quantize.ZERO_POINT) @ weight_numbers.long().t()
    expected = exact.double() * scales.double()[:, None] * weight_scales.double()
    expected += 0.0 if bias is None else bias.double()
    out = Int8Linear(weight, bias)(x)
    assert out.shape == (1, num_rows, 96)
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_an_outlier_in_one_row_changes_no_other() -> None:
    torch.manual_seed(42)
    layer, x = Int8Linear(torch.randn(64, 128), None), torch.randn(9, 128)
    calm = layer(x)
    x[4, 7] = 1e6
    wild = layer(x)
    assert torch.equal(calm[[0, 1, 2, 3, 5, 6, 7, 8]], wild[[0, 1, 2, 3, 5, 6, 7, 8]])
    assert torch.equal(layer(x[2:3]), calm[2:3])


@pytest.mark.parametrize(
    ("dtype", "bytes_per_head"),
    [(torch.float32, 256), (torch.float16, 128), (torch.bfloat16, 128), (torch.int8, 68), (FP8, 68)],
)
def test_fewer_bits_make_more_blocks(dtype: torch.dtype, bytes_per_head: int) -> None:
    """64 numbers a head, and 4 bytes for the scale where there is one."""
    shape = KVCacheShape(num_layers=3, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    assert shape.block_bytes == 3 * 2 * 2 * 16 * bytes_per_head
    config = EngineConfig(model="echo", kv_cache_memory_bytes=2**20)
    assert num_blocks_for(config, shape, torch.device("cpu")) == 2**20 // shape.block_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "bfloat16", "int8", "fp8"])
def test_a_quantised_cache_follows_fp32(kv_cache_dtype: str, directory: str) -> None:
    """Copy-on-write and the prefix cache included: scales travel with their blocks."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, n=2)
    prompts = [[1, 2, 3] * 13, [1, 2, 3] * 13 + [5], [7]]
    exact, rounded = make_llm(directory), make_llm(directory, kv_cache_dtype=kv_cache_dtype)
    assert rounded.engine.stats().tier == "continues"
    assert rounded.engine.stats().kv.capacity_blocks > 1.8 * exact.engine.stats().kv.capacity_blocks
    for ours, theirs in zip(rounded.generate(prompts, params), exact.generate(prompts, params), strict=True):
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            assert a.logprobs is not None
            assert b.logprobs is not None
            assert abs((a.logprobs[0].logprob or 0.0) - (b.logprobs[0].logprob or 0.0)) < 0.02


def test_int8_weights_take_a_quarter(directory: str) -> None:
    exact, rounded = make_llm(directory), make_llm(directory, quantization="int8")
    assert rounded.engine.stats().tier == "continues"
    embedding = 4 * 101 * 64
    linear = exact.engine.stats().memory_bytes["weights"] - embedding
    assert rounded.engine.stats().memory_bytes["weights"] - embedding < 0.35 * linear


@pytest.mark.parametrize("option", [{"kv_cache_dtype": "int4"}, {"quantization": "fp8"}], ids=str)
def test_what_is_unknown_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        EngineConfig(model="echo", **option)
