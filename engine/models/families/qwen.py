"""Qwen 1: a Qwen2 variant with as many KV heads as heads, and q, k and v in one tensor.

Its config has twice the MLP's width. Above `seq_length` its original code rescales queries (logn attention)
and rotation (dynamic NTK) with every length; up to there both are the identity. The served context is
therefore limited to it.
"""

from __future__ import annotations

from transformers import PretrainedConfig, Qwen2Config

from pagemill.engine.models.families.family import RawConfig, Tensors, require
from pagemill.engine.models.families.llama_like import like_llama, renamed, shared_fields, split_rows

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_NAMES = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".attn.c_proj.": ".self_attn.o_proj.",
    # silu is applied to the second of the two.
    ".mlp.w1.": ".mlp.up_proj.",
    ".mlp.w2.": ".mlp.gate_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}


def _build_config(raw: RawConfig) -> PretrainedConfig:
    require(raw.get("no_bias", True) is True, "Qwen with no_bias=false is not supported")
    rotary_share = raw.get("rotary_pct", 1.0)
    require(rotary_share == 1.0, f"Qwen with rotary_pct={rotary_share} is not supported")
    fields = shared_fields(raw)
    context = raw.get("max_position_embeddings")
    if raw.get("use_dynamic_ntk", True) or raw.get("use_logn_attn", True):
        context = raw.get("seq_length") or context
    num_heads = fields["num_attention_heads"]
    fields |= {
        "intermediate_size": fields["intermediate_size"] // 2,
        "num_key_value_heads": num_heads,
        "head_dim": raw.get("kv_channels") or fields["hidden_size"] // num_heads,
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-6),
        "rope_theta": raw.get("rotary_emb_base", 10000),
        "hidden_act": "silu",
    }
    if context is not None:
        fields["max_position_embeddings"] = context
    config: PretrainedConfig = Qwen2Config.from_dict(fields)
    return config


def _convert_tensors(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    return renamed(split_rows(tensors, "attn.c_attn", _QKV), _NAMES)


QWEN = like_llama(
    "Qwen", "qwen", "QWenLMHeadModel", build_config=_build_config, convert_tensors=_convert_tensors
)
