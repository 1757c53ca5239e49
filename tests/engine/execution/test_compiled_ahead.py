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

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # a minute of compiling

SIZES: dict[str, Any] = {
    "vocab_size": 1003, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
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
    start = _compiled_at_start(LlamaConfig(**SIZES), options, tmp_path, has_adapter=True)
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
    assert set(start) >= LOW_RANK
    if "quantization" in options:
        assert set(start) >= ROUNDED


def test_requests_to_experts_compile_nothing(tmp_path: Path) -> None:
    """Both tiles of the matmuls are compiled."""
    start = _compiled_at_start(MIXTURE, {}, tmp_path)
    assert {name: start[name] for name in EXPERTS} == EXPERTS


def _compiled_at_start(
    config: PretrainedConfig, options: dict[str, object], directory: Path, *, has_adapter: bool = False
) -> Any:
    """Return the number of variants of each kernel; requests must compile no others."""
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    if has_adapter:
        options = options | {"adapters": [f"one={save_adapter(directory, directory / 'adapter')}"]}
    done = run_python(
        "-m", "tests.engine.execution.fake_gpu", str(directory), json.dumps(options), timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = json.loads(done.stdout.splitlines()[-1])
    start = rounds.pop("start")
    assert len(rounds) >= 4
    assert not any(rounds.values()), f"compiled while serving: {rounds}"
    return start
