"""On CUDA's path every kernel is compiled at startup: a request that waits for the compiler delays all rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from tests.conftest import run_python
from tests.engine.adapters.trained import save_adapter
from tests.engine.models.quantized.checkpoints import FORMATS, quantize

pytest.importorskip("triton")

from pagemill.kernels.gpu.tuning import MATMUL_TILES

pytestmark = pytest.mark.slow  # a minute of compiling

SIZES: dict[str, Any] = {
    "vocab_size": 1003, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES)
# Sizes that torch's grouped matmul does not support.
MIXTURE = Qwen3MoeConfig(**SIZES, moe_intermediate_size=102, num_experts=8, num_experts_per_tok=2)
EXPERTS = {
    "combine_experts_kernel": 1, "expert_matmul_kernel": 4, "expert_places_kernel": 1, "spread_rows_kernel": 1,
}  # fmt: skip
"""Variants of each kernel; the matmuls have two sizes."""
LOW_RANK = {"shrink_kernel", "expand_kernel"}
ROUNDED = {"rms_norm_kernel", "quantize_rows_kernel", "scaled_matmul_kernel"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "fp8", "kv_cache_dtype": "fp8", "enforce_eager": True},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"quantization": "int8", "enforce_eager": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "bf16",
)
def test_requests_compile_nothing(options: dict[str, object], tmp_path: Path) -> None:
    _save(LLAMA, tmp_path)
    adapter = save_adapter(tmp_path, tmp_path / "adapter")
    start = _compiled_at_startup(tmp_path, options | {"adapters": [f"one={adapter}"]})
    assert set(start) >= LOW_RANK
    if "quantization" in options:
        assert set(start) >= ROUNDED


def test_requests_of_a_quantized_checkpoint_compile_nothing(tmp_path: Path) -> None:
    _save(LLAMA, tmp_path / "plain")
    quantize(tmp_path / "plain", tmp_path / "stored", FORMATS["awq"][0])
    start = _compiled_at_startup(tmp_path / "stored", {"max_num_batched_tokens": 512})
    num_tiles = sum(size == 2 for _, size, _ in MATMUL_TILES)
    assert (start["grouped_matmul_kernel"], start["widen_kernel"]) == (num_tiles, 1)


def test_requests_to_experts_compile_nothing(tmp_path: Path) -> None:
    """Both tiles of the matmuls are compiled."""
    _save(MIXTURE, tmp_path)
    start = _compiled_at_startup(tmp_path, {})
    assert {name: start[name] for name in EXPERTS} == EXPERTS


def _save(config: PretrainedConfig, directory: Path) -> None:
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)


def _compiled_at_startup(directory: Path, options: dict[str, object]) -> dict[str, int]:
    """Return the numbers of kernels' variants that are compiled at startup; check that requests compile none."""
    given = json.dumps(options)
    done = run_python("-m", "tests.engine.execution.fake_gpu", str(directory), given, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = json.loads(done.stdout.splitlines()[-1])
    start: dict[str, int] = rounds.pop("start")
    assert {name for name in start if "attention" in name} == {
        "paged_attention_decode_kernel",
        "paged_attention_prefill_kernel",
    }
    assert {
        "sampling_cuts_kernel",
        "gumbel_argmax_kernel",
        "copy_blocks_kernel",
        "merge_splits_kernel",
    } <= set(start)
    assert len(rounds) >= 4
    assert not any(rounds.values()), f"compiled while serving: {rounds}"
    return start
