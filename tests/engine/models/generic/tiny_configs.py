"""Tiny configurations for any `model_type` of transformers' causal language models, two per type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

from pagemill.engine.models.families.adaptations import PAST_PADDING

Config = dict[str, Any]

VOCAB_SIZE = 97
NUM_LAYERS = 2
VARIANTS = (0, 1)
_WINDOW = 6
"""Shorter than most prompts."""

_LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), NUM_LAYERS
)
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "attention_heads",
     "decoder_attention_heads", "encoder_attention_heads"), 4
)  # fmt: skip
_WIDTHS = dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 64)
_INNER = dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 96)
_POSITIONS = dict.fromkeys(("max_position_embeddings", "n_positions"), 128)
_EXPERTS: Config = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    "num_expert_group": 1,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
_RECURRENT = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
    "state_size": 16, "chunk_size": 8, "mamba_chunk_size": 8,
}  # fmt: skip
_SIZES: Config = {
    **_LAYERS, **_HEADS, **_WIDTHS, **_INNER, **_POSITIONS, **_EXPERTS, **_LATENT, **_RECURRENT,
    "vocab_size": VOCAB_SIZE, "num_key_value_heads": 2, "head_dim": 16, "is_decoder": True,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_EVEN_IF_NONE = frozenset({"num_key_value_heads", "head_dim", "n_inner", "pad_token_id"})
"""Fields whose default None represents a value that follows from others."""

_MAMBA: Config = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_ZAMBA: Config = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
_BOTH_KINDS = ["sliding_attention", "full_attention"]
_ROPE_BY_KIND: Config = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _BOTH_KINDS}
_NO_INPUTS_PER_LAYER: Config = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_GEMMA4: Config = {
    "layer_types": _BOTH_KINDS,
    "per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}},
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_EXCEPTIONS: dict[str, Config] = {
    **{kind: {"pad_token_id": 1} for kind in PAST_PADDING},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_KIND, "layer_types": _BOTH_KINDS},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {
        "layer_types": _BOTH_KINDS,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "per_layer_config": None,
        "head_dim": 24,
    },
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": 2 * _BOTH_KINDS,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "intermediate_size": [96, 96, 96, 96],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "laguna": {"num_attention_heads_per_layer": [4, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "qk_head_dim": 24,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "llama4_text": {
        "attention_chunk_size": _WINDOW,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
        "floor_scale": 4,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
        "lru_width": 64,
        "attention_window_size": _WINDOW,
    },
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16]},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX", "pad_token_id": 1},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA | {"hybrid_layer_ids": [1, 3], "mamba_headdim": 16, "adapter_rank": 8},
    "zaya": {"num_experts_per_tok": 1},
}
_PLAIN_ROPE: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
_SECOND: dict[str, Config] = {
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_KIND},
    "dbrx": {"tie_word_embeddings": False},
    "gemma3n_text": {"layer_types": 2 * _BOTH_KINDS},
    "gemma4_text": {"layer_types": _BOTH_KINDS, "per_layer_config": {"1": {"head_dim": 8}}},
    "gemma4_unified_text": {"layer_types": _BOTH_KINDS, "per_layer_config": {"1": {"head_dim": 8}}},
    "llama4_text": {"no_rope_layers": [0, 1], "use_qk_norm": False, "num_experts_per_tok": 2},
    "mimo_v2_flash": {"num_key_value_heads": 1},  # twice as many in layers with a window
    "phi4_multimodal": _PLAIN_ROPE,
    "phimoe": _PLAIN_ROPE,
    "recurrent_gemma": _PLAIN_ROPE,
}
"""In addition to the changes of every second configuration."""
_NESTED: dict[str, Config] = {
    "dots3_note": {},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text"} | _NO_INPUTS_PER_LAYER},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"} | _NO_INPUTS_PER_LAYER},
}
"""Types rejected by their nested configurations, which cannot be shrunk to valid ones."""


def tiny_config(model_type: str, variant: int) -> Config:
    """config.json of a tiny model: grouped heads and its defaults, or in variant 1 as many KV heads as heads,
    the opposite tying of the head, windows in the other layers, and scaled rotation."""
    if model_type in _NESTED:
        return _NESTED[model_type]
    fields = shrunk(CONFIG_MAPPING[model_type]().to_dict())
    if "qk_rope_head_dim" in fields:  # latent attention: every query has a separate key
        fields |= {"head_dim": _LATENT["qk_rope_head_dim"], "num_key_value_heads": 4}
    fields |= _EXCEPTIONS.get(model_type, {})
    if variant == 1:
        fields |= _varied(fields) | _SECOND.get(model_type, {})
    return {name: value for name, value in fields.items() if name not in ("dtype", "torch_dtype")}


def shrunk(fields: Mapping[str, Any]) -> Config:
    small: Config = {}
    for name, value in fields.items():
        if name == "text_config":
            small[name] = value  # rejected, for any value
        elif isinstance(value, dict) and name.endswith("_config"):
            small[name] = shrunk(value)
        elif name in _SIZES and (value is not None or name in _EVEN_IF_NONE):
            small[name] = _SIZES[name]
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            small[name] = (list(dict.fromkeys(value)) * NUM_LAYERS)[:NUM_LAYERS]
        elif name == "sliding_window" and value is not None:
            small[name] = _WINDOW
        else:
            small[name] = value
    return small


def _varied(fields: Config) -> Config:
    changed: Config = {"tie_word_embeddings": not fields.get("tie_word_embeddings", True)}
    if "num_key_value_heads" in fields:
        changed["num_key_value_heads"] = 4
    else:
        changed |= {name: 2 for name in _HEADS if name in fields}
    if (layer_types := fields.get("layer_types")) is not None:
        changed["layer_types"] = layer_types[::-1]
    if fields.get("sliding_window", 0) is None:
        changed["sliding_window"] = _WINDOW
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type") == "default":
        changed["rope_parameters"] = rope | {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0}
    return changed
