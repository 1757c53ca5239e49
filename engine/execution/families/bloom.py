"""BLOOM. transformers' attention adds its ALiBi tensor by itself; here the kernel computes the biases."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig

from pagemill.engine.execution.families.alibi import alibi_slopes
from pagemill.engine.execution.families.family import Family, RawConfig, native_config

_TRAINED_CONTEXT = 2048


def _build_config(raw: RawConfig) -> PretrainedConfig:
    config: Any = native_config(raw)
    config.max_position_embeddings = raw.get("seq_length") or _TRAINED_CONTEXT
    return config


def _adapt(module: nn.Module) -> None:
    from transformers.models.bloom.modeling_bloom import BloomAttention, BloomMLP

    from pagemill.engine.execution.families.bloom_attention import PagedBloomAttention

    for child in module.modules():
        if isinstance(child, BloomAttention):
            child.__class__ = PagedBloomAttention
            child.register_buffer("alibi_slopes", alibi_slopes(child.num_heads), persistent=False)
        if isinstance(child, BloomMLP):
            # Reproduces the summation order of a tensor-parallel training run; nothing to us, and it reads weights
            # that fusion repacks.
            child.slow_but_exact = False


BLOOM = Family(
    name="BLOOM",
    model_types=("bloom",),
    architectures=("BloomForCausalLM",),
    build_config=_build_config,
    adapt=_adapt,
    has_attention_interface=False,
    extrapolates=lambda _config: True,
)
