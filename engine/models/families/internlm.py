"""InternLM 1 (a LLaMA with biases), InternLM 2 and 2.5 (a LLaMA with packed, renamed tensors), InternLM 3 (a LLaMA)."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from pagemill.engine.models.families.family import RawConfig, Tensors, require
from pagemill.engine.models.families.llama_like import like_llama, renamed, shared_fields

_INTERNLM2_NAMES = {
    "model.tok_embeddings.": "model.embed_tokens.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".attention.wqkv.": ".self_attn.wqkv.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
}


def _build_internlm_config(raw: RawConfig) -> PretrainedConfig:
    config: PretrainedConfig = LlamaConfig.from_dict(
        shared_fields(raw, **_rotary_fields(raw)) | {"attention_bias": bool(raw.get("bias", True))}
    )
    return config


def _rotary_fields(raw: RawConfig) -> dict[str, Any]:
    """Convert later config.json files' {"rotary": {"base": ..., "type": "dynamic" | "origin"}}."""
    rotary = raw.get("rotary")
    if not rotary:
        return {}
    fields: dict[str, Any] = {"rope_theta": rotary.get("base", 10000)}
    kind = rotary.get("type", "origin")
    require(kind in ("origin", "dynamic"), f"InternLM with rotary type {kind!r} is not supported")
    if kind == "dynamic":
        fields["rope_scaling"] = {"rope_type": "dynamic", "factor": float(rotary.get("scaling_factor", 1.0))}
    return fields


def _build_internlm2_config(raw: RawConfig) -> PretrainedConfig:
    config: PretrainedConfig = LlamaConfig.from_dict(
        shared_fields(raw) | {"attention_bias": bool(raw.get("bias", False))}
    )
    return config


def _convert_internlm2_tensors(tensors: Tensors, config: Any) -> Tensors:
    out: Tensors = {}
    for name, tensor in renamed(tensors, _INTERNLM2_NAMES).items():
        if ".wqkv." in name:
            out |= _split_by_kv_head(name, tensor, config)
        elif name.startswith("output."):
            out[f"lm_head.{name.removeprefix('output.')}"] = tensor
        else:
            out[name] = tensor
    return out


def _split_by_kv_head(name: str, packed: Any, config: Any) -> Tensors:
    """Split rows that are grouped by KV head: its query heads, its key, its value, head_dim rows each."""
    group_size = config.num_attention_heads // config.num_key_value_heads
    rows = packed.unflatten(0, (config.num_key_value_heads, group_size + 2, -1))
    parts = {"q_proj": rows[:, :-2], "k_proj": rows[:, -2], "v_proj": rows[:, -1]}
    return {name.replace("wqkv", part): x.reshape(-1, *packed.shape[1:]) for part, x in parts.items()}


def _build_internlm3_config(raw: RawConfig) -> PretrainedConfig:
    bias, qkv_bias = bool(raw.get("bias", False)), bool(raw.get("qkv_bias", False))
    require(bias == qkv_bias, "InternLM 3 with qkv_bias different from bias is not supported")
    config: PretrainedConfig = LlamaConfig.from_dict(
        shared_fields(raw) | {"attention_bias": qkv_bias, "mlp_bias": bias}
    )
    return config


FAMILIES = (
    like_llama("InternLM", "internlm", "InternLMForCausalLM", build_config=_build_internlm_config),
    like_llama(
        "InternLM 2, 2.5",
        "internlm2",
        "InternLM2ForCausalLM",
        build_config=_build_internlm2_config,
        convert_tensors=_convert_internlm2_tensors,
    ),
    like_llama("InternLM 3", "internlm3", "InternLM3ForCausalLM", build_config=_build_internlm3_config),
)
