"""Rewrites a loaded model in place for CUDA: merged products, and the fused kernels around them.

Runs before `pagemill.engine.layers.cpu_fusion`, which sees to the layers that are left. The operators come from
`pagemill.kernels.dispatch`, so the rewritten model computes the same on any device; only on CUDA it is faster for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.attention import current_context
from pagemill.engine.layers.cpu_fusion import (
    OFFSET_RMS_NORM,
    RMS_NORM,
    ROTARY_ATTENTION,
    MergedAttention,
    RMSNorm,
    SiluGatedMLP,
    is_silu_gated,
)
from pagemill.engine.layers.decoder_layer import PRE_NORM_LAYERS
from pagemill.engine.layers.linear import LinearOptions
from pagemill.kernels import dispatch
from pagemill.kernels.types.rotation import Rotation


def fuse_for_cuda(model: nn.Module, linear: LinearOptions) -> None:
    """Replace the modules that are known; their weights move into the new ones."""
    _fuse_children(model, linear)
    for parent in model.modules():
        for child in parent.children():
            if isinstance(child, nn.ModuleList) and len(child) and isinstance(child[0], PreNormLayer):
                _chain(list(child), getattr(parent, "norm", None))


def _fuse_children(parent: nn.Module, linear: LinearOptions) -> None:
    for name, child in parent.named_children():
        _fuse_children(child, linear)
        replacement = _replacement(child, linear)
        if replacement is not None:
            setattr(parent, name, replacement)


def _replacement(module: Any, linear: LinearOptions) -> nn.Module | None:
    kind = type(module).__name__
    if kind in RMS_NORM + OFFSET_RMS_NORM:
        return FusedRMSNorm(module)
    if kind in ROTARY_ATTENTION:
        return FusedRotaryAttention(module, linear)
    if is_silu_gated(module):
        return SiluGatedMLP(module, linear, dispatch.silu_and_mul)
    if kind in PRE_NORM_LAYERS and isinstance(module.input_layernorm, FusedRMSNorm):
        return PreNormLayer(module)
    return None


def _chain(layers: list[Any], last_norm: nn.Module | None) -> None:
    """Let each layer compute the norm that reads its output: the next layer's, or the one after the last."""
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        norm = last_norm if following is None else getattr(following, "input_layernorm", None)
        if isinstance(norm, FusedRMSNorm):
            layer.add_next_norm(norm)


class FusedRMSNorm(RMSNorm):
    """Its output may be there before it is asked for."""

    def __init__(self, source: Any) -> None:
        super().__init__(source, dispatch.rms_norm)
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    def hold(self, x: torch.Tensor, normed: torch.Tensor) -> None:
        """`normed` is the norm of `x`, should that very tensor come next."""
        self._input, self._output = x, normed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known, output = self._input, self._output
        self._input = self._output = None
        if known is x and output is not None:
            return output
        return super().forward(x)


class FusedRotaryAttention(MergedAttention):
    """One product, one kernel for norms, rotation and the cache's write, then paged attention."""

    def _rotation(self, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> Rotation:
        cos, sin = (angles[0] for angles in position_embeddings) if self.rotates else (None, None)
        if self.q_norm is None or self.k_norm is None:
            return Rotation(cos, sin)
        return Rotation(cos, sin, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos, sin [1, num_tokens, rotary_dim]
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        context = current_context()
        cache = context.layers[self.layer_idx]
        query, key, value = self.project(hidden_states[0])
        rotation = self._rotation(position_embeddings)
        slots = context.metadata.slot_mapping
        query = dispatch.rotary_and_cache(query, key, value, rotation, cache, slots)
        out = dispatch.paged_attention(query, cache, context.metadata, self.scoring)
        return self.o_proj(out.view(len(out), -1))[None], None


class PreNormLayer(nn.Module):
    """A decoder layer whose additions are part of the norms that follow them, the next layer's included."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.input_layernorm: FusedRMSNorm = source.input_layernorm
        self.self_attn = source.self_attn
        self.post_attention_layernorm: FusedRMSNorm = source.post_attention_layernorm
        self.mlp = source.mlp
        self._next_norm: list[FusedRMSNorm] = []  # in a list, so that it is nobody's second parent
        if hasattr(source, "attention_type"):  # the models that mix windows look a layer's mask up by it
            self.attention_type = source.attention_type

    def add_next_norm(self, norm: FusedRMSNorm) -> None:
        self._next_norm.append(norm)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        attention_mask: torch.Tensor | None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        attended, _weights = self.self_attn(normed, position_embeddings)
        norm = self.post_attention_layernorm
        normed_rows, residual = dispatch.add_rms_norm(attended[0], hidden_states[0], norm.weight, norm.eps)
        out = self.mlp(normed_rows)
        if not self._next_norm:
            total: torch.Tensor = out + residual
            return total[None]
        (following,) = self._next_norm
        normed_rows, hidden_rows = dispatch.add_rms_norm(out, residual, following.weight, following.eps)
        hidden_states = hidden_rows[None]
        following.hold(hidden_states, normed_rows[None])
        return hidden_states
