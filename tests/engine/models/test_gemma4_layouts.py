"""Published layouts of Gemma 4 equal transformers: inputs per layer, shared KV layers, keys as values, experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.models.families.multimodal_trial import edit_config, write_multimodal
from tests.engine.models.generic.trial import check_served

FOUR_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": None,  # published configurations contain the next two instead
    "global_head_dim": 32,
    "num_global_key_value_heads": None,
}
NO_INPUTS_PER_LAYER = {"hidden_size_per_layer_input": 0}
KEYS_AS_VALUES: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "E2B": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "E4B": {"num_kv_shared_layers": 2},
    "31B": NO_INPUTS_PER_LAYER | KEYS_AS_VALUES,
    "26B-A4B": NO_INPUTS_PER_LAYER
    | KEYS_AS_VALUES
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
}
QUICK = ("E2B", "26B-A4B")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_published_layout_equals_the_whole_model(layout: str, tmp_path: Path) -> None:
    module, expected = write_multimodal("gemma4", 0, tmp_path, **FOUR_LAYERS | LAYOUTS[layout])
    check_served(tmp_path, module, expected)


@pytest.mark.slow
def test_the_unified_layout_equals_the_whole_model_and_needs_no_encoders(tmp_path: Path) -> None:
    module, expected = write_multimodal("gemma4_unified", 0, tmp_path, **FOUR_LAYERS | KEYS_AS_VALUES)
    check_served(tmp_path, module, expected)
    edit_config(tmp_path, audio_config=None, vision_config=None)
    check_served(tmp_path, module, expected)
