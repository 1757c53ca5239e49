"""A family's declaration of its decoder, on which fused and compiled layers rely instead of class names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTraits:
    """A decoder in LLaMA's layout. The defaults are LLaMA's.

    The layout: `model` has `embed_tokens`, `layers`, `norm` and `rotary_emb`; a layer has `self_attn`, `mlp`
    and its norms, all of one class; attention has `q_proj`, `k_proj` and `v_proj`, or `qkv_proj`, and
    `o_proj`. Settings of the configuration are read from the modules: activation, norms per head, layers that
    do not rotate.
    """

    norm: Literal["rms", "offset_rms"] = "rms"
    """x / rms(x) * weight, or * (1 + weight)."""
    rotation: Literal["one", "by_layer_type"] = "one"
    """The layers that share a table of angles. Pairs half a head apart are rotated in all of them."""
    residual: Literal["pre_norm", "sandwich"] = "pre_norm"
    """pre_norm: hidden + attention(norm(hidden)), then hidden + mlp(norm(hidden)). sandwich: norms on both sides."""
    window: Literal["by_layer", "one"] = "by_layer"
    """The location of `sliding_window`: on each attention, if any; one: in the configuration, for every layer."""
    has_softcap: bool = False
    """Scores are capped by `attn_logit_softcapping`."""
    has_half_angles: bool = False
    """Each angle is passed once for both values of a pair, cos and sin [num_tokens, rotary_dim / 2]."""
    is_plain: bool = True
    """The logits are exactly lm_head(norm(layers(embed_tokens(ids))))."""


LLAMA_DECODER = DecoderTraits()
