"""On CUDA's path every kernel is compiled at startup: a request that waits for the compiler delays all rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.conftest import run_python

pytest.importorskip("triton")


slow = pytest.mark.slow  # a minute of compiling

ROUNDED = {"rms_norm_kernel", "quantize_rows_kernel", "scaled_matmul_kernel"}


@pytest.mark.slow
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
    config = LlamaConfig(
        vocab_size=1003, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    done = run_python(
        "-m", "tests.engine.execution.fake_gpu", str(tmp_path), json.dumps(options), timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = json.loads(done.stdout.splitlines()[-1])
    start = rounds.pop("start")
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
    if "quantization" in options:
        assert set(start) >= ROUNDED
    assert len(rounds) >= 4
    assert not any(rounds.values()), f"compiled while serving: {rounds}"
