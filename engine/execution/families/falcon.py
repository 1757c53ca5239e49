"""Falcon: one KV head (7B), grouped heads (40B, 180B, 11B) or all heads; rotary positions or ALiBi (RW).

transformers' attention repeats the KV heads and calls torch itself; here they stay as few as they are.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import FalconConfig, PretrainedConfig

from pagemill.engine.execution.families.alibi import alibi_slopes
from pagemill.engine.execution.families.family import Family, RawConfig

# config.json before Falcon was part of transformers.
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


def _adapt(module: nn.Module) -> None:
    from transformers.models.falcon.modeling_falcon import FalconAttention

    from pagemill.engine.execution.families.falcon_attention import PagedFalconAttention

    for child in module.modules():
        if isinstance(child, FalconAttention):
            child.__class__ = PagedFalconAttention
            slopes = None
            if child.config.alibi:
                # Trained with slopes rounded to bf16, and with the bias inside the scaled product.
                slopes = alibi_slopes(child.num_heads).bfloat16().float() * child.inv_norm_factor
            child.register_buffer("alibi_slopes", slopes, persistent=False)


FALCON = Family(
    name="Falcon",
    model_types=("falcon", *_FIRST_RELEASE_TYPES),
    architectures=("FalconForCausalLM", "RWForCausalLM"),
    build_config=_build_config,
    adapt=_adapt,
    has_attention_interface=False,
    num_kv_heads=num_kv_heads_of,
    extrapolates=lambda config: bool(config.alibi),
)
