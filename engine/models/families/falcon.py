"""Falcon: one KV head (7B), grouped heads (40B, 180B, 11B) or all heads; rotary positions or ALiBi (RW).

transformers' attention repeats the KV heads and calls torch; here they are not repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import FalconConfig, PretrainedConfig

from pagemill.engine.layers.attention import attend
from pagemill.engine.layers.positions.alibi import alibi_slopes
from pagemill.engine.layers.share import CHANNELS, INPUTS, QKV_BY_KV_HEAD, TensorSplit
from pagemill.engine.models.families.family import Family, RawConfig, replace_attention
from pagemill.kernels.types.scoring import Scoring

# Types in config.json from before Falcon was part of transformers.
_FIRST_RELEASE_TYPES = ("RefinedWeb", "RefinedWebModel")
_FIRST_RELEASE_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
}
_FIRST_RELEASE_DEFAULTS = {"multi_query": False, "parallel_attn": False, "alibi": False, "bias": False}


def num_kv_heads_of(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _build_config(raw: RawConfig) -> PretrainedConfig:
    fields = dict(raw)
    if fields.get("model_type") in _FIRST_RELEASE_TYPES:
        fields = _FIRST_RELEASE_DEFAULTS | {_FIRST_RELEASE_NAMES.get(k, k): v for k, v in fields.items()}
        fields["new_decoder_architecture"] = raw["model_type"] == "RefinedWeb"
        fields["model_type"] = "falcon"
    config: PretrainedConfig = FalconConfig.from_dict(fields)
    return config


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    *_: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    num_tokens = hidden_states.shape[1]
    # Every layout is the same: per KV head, the query heads that share it, its key, its value.
    heads = self.query_key_value(hidden_states).view(1, num_tokens, self.num_kv_heads, -1, self.head_dim)
    query, key, value = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
    if self.alibi_slopes is None:
        assert position_embeddings is not None
        query, key = self.rotate(query, key, *position_embeddings, unsqueeze_dim=2)
    scoring = Scoring(self.inv_norm_factor, alibi_slopes=self.alibi_slopes)
    out = attend(self.layer_idx, query[0], key[0], value[0], scoring)
    return self.dense(out.flatten(1))[None], None


def _adapt(module: nn.Module) -> None:
    from transformers.models.falcon.modeling_falcon import (
        FalconAttention,
        FalconLinear,
        apply_rotary_pos_emb,
    )

    for child in module.modules():
        if type(child) is FalconLinear:  # the same matmul with a separate forward: packed like any other
            child.__class__ = nn.Linear
    rotate = staticmethod(apply_rotary_pos_emb)
    for attention in replace_attention(module, FalconAttention, forward=_forward, rotate=rotate):
        attention.num_kv_heads = num_kv_heads_of(attention.config)
        slopes = None
        if attention.config.alibi:
            # Trained with slopes rounded to bf16, and with the bias added before scaling.
            slopes = alibi_slopes(attention.num_heads).bfloat16().float() * attention.inv_norm_factor
        attention.register_buffer("alibi_slopes", slopes, persistent=False)


_SPLIT = TensorSplit(
    layers={
        "h.*.self_attention.query_key_value": QKV_BY_KV_HEAD,
        "h.*.self_attention.dense": INPUTS,
        "h.*.mlp.dense_h_to_4h": CHANNELS,
        "h.*.mlp.dense_4h_to_h": INPUTS,
    },
    intermediate_size=lambda config: int(config.ffn_hidden_size),
    kv_head_counts=("num_kv_heads",),
)

FALCON = Family(
    name="Falcon",
    model_types=("falcon", *_FIRST_RELEASE_TYPES),
    architectures=("FalconForCausalLM", "RWForCausalLM"),
    build_config=_build_config,
    adapt=_adapt,
    has_attention_interface=False,
    num_kv_heads=num_kv_heads_of,
    split=_SPLIT,
    extrapolates=lambda config: bool(config.alibi),
)
