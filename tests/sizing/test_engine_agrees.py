"""Sizes from config.json, compared with those of the engine that loads the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.builder import build_parts
from pagemill.engine.config import EngineConfig
from pagemill.engine.figures import read_figures
from pagemill.sizing.cards import cpu
from pagemill.sizing.plan import Load, WorkerLimits, make_plan
from tests.engine import tiny_model

POOL_BYTES = 3_000_000
MAKERS = sorted(name for name in dir(tiny_model) if name.startswith("save_tiny_"))
WINDOWS: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "std": 0.3, "vocab_size": 61, "eos": [3],
}  # fmt: skip


def blocks_planned(config: EngineConfig) -> tuple[int, int]:
    """Blocks and a block's bytes, according to a plan."""
    model = read_figures(config, on_card=False)
    load = Load(prompt_tokens=20, output_tokens=10, jobs_per_s=1.0)
    limits = WorkerLimits(max_num_seqs=8, kv_bytes=config.kv_cache_memory_bytes)
    made = make_plan(model, cpu(1 << 30, 1e10, 1e11, "given"), load, limits)
    return made.kv_blocks, model.block_bytes


def check(config: EngineConfig) -> None:
    parts = build_parts(config)
    try:
        assert blocks_planned(config) == (parts.limits.num_kv_blocks, parts.kv_block_bytes)
    finally:
        getattr(parts.executor, "close", lambda: None)()


@pytest.mark.parametrize("name", MAKERS)
def test_blocks_of_tiny_checkpoints(name: str, tmp_path: Path) -> None:
    make: Callable[[Path], Any] = getattr(tiny_model, name)
    make(tmp_path, **(WINDOWS if name == "save_tiny_ministral" else {}))
    config = EngineConfig(
        model=str(tmp_path), skip_tokenizer_init=True, device="cpu", kv_cache_memory_bytes=POOL_BYTES,
        verify=False,
    )  # fmt: skip
    check(config)


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"block_size": 5}, {"dtype": "bfloat16"}])
def test_blocks_of_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_model.save_tiny_llama(tmp_path)
    common = {"skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory_bytes": POOL_BYTES}
    check(EngineConfig(model=str(tmp_path), **common, **settings))  # type: ignore[arg-type]


def test_blocks_of_a_type_that_no_family_names(tmp_path: Path) -> None:
    """Its attention is only known at run time: here in one narrow layer."""
    sizes = {
        "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 128, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    common = {
        "skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory_bytes": POOL_BYTES, "verify": False,
    }  # fmt: skip
    check(EngineConfig(model=str(tmp_path), load_format="dummy", **common))  # type: ignore[arg-type]


@pytest.mark.slow
def test_blocks_of_the_packaged_model() -> None:
    check(EngineConfig(model="smollm2", device="cpu", kv_cache_memory_bytes=100_000_000))
