"""BLOOM. transformers' attention adds an ALiBi tensor; here the kernel computes the biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from pagemill.engine.layers.attention import attend
from pagemill.engine.layers.positions.alibi import alibi_slopes
from pagemill.engine.layers.share import CHANNELS, INPUTS, QKV_BY_KV_HEAD, TensorSplit
from pagemill.engine.models.families.family import Family, RawConfig, native_config, replace_attention
from pagemill.kernels.types.scoring import Scoring

_TRAINED_CONTEXT = 2048


def _build_config(raw: RawConfig) -> PretrainedConfig:
    config: Any = native_config(raw)
    config.max_position_embeddings = raw.get("seq_length") or _TRAINED_CONTEXT
    return config


def _forward(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    # [1, num_heads, num_tokens, head_dim] each
    heads = self._reshape(self.query_key_value(hidden_states))
    query, key, value = (x[0].transpose(0, 1) for x in heads)
    scoring = Scoring(self.inv_norm_factor, alibi_slopes=self.alibi_slopes)
    out = attend(self.layer_idx, query, key, value, scoring)
    return residual + self.dense(out.flatten(1))[None], None


def _adapt(module: nn.Module) -> None:
    from transformers.models.bloom.modeling_bloom import BloomAttention, BloomMLP

    for attention in replace_attention(module, BloomAttention, forward=_forward):
        attention.register_buffer("alibi_slopes", alibi_slopes(attention.num_heads), persistent=False)
    for child in module.modules():
        if isinstance(child, BloomMLP):
            # Reproduces the summation order of a tensor-parallel training run; irrelevant here, and it reads
            # weights that fusion repacks.
            child.slow_but_exact = False


_SPLIT = TensorSplit(
    layers={
        "h.*.self_attention.query_key_value": QKV_BY_KV_HEAD,
        "h.*.self_attention.dense": INPUTS,
        "h.*.mlp.dense_h_to_4h": CHANNELS,
        "h.*.mlp.dense_4h_to_h": INPUTS,
    },
    intermediate_size=lambda config: 4 * int(config.hidden_size),
    head_counts=("num_heads",),
)

BLOOM = Family(
    name="BLOOM",
    model_types=("bloom",),
    architectures=("BloomForCausalLM",),
    build_config=_build_config,
    adapt=_adapt,
    has_attention_interface=False,
    split=_SPLIT,
    extrapolates=lambda _config: True,
)
