"""A decoder's modules on CUDA: merged products, and the fused kernels around them.

The operators come from `pagemill.kernels.dispatch`, so the rewritten model computes the same on any device;
only on CUDA is it faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.attention import current_context
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.fusion import Fusion, MergedAttention, RMSNorm
from pagemill.engine.layers.linear import MakeProduct
from pagemill.kernels import dispatch
from pagemill.kernels.types.rotation import Rotation


class FusedRMSNorm(RMSNorm):
    """An RMSNorm whose output may have been computed in advance."""

    _input: torch.Tensor | None = None
    _output: torch.Tensor | None = None

    def hold(self, x: torch.Tensor, normed: torch.Tensor) -> None:
        """Keep `normed` as the norm of `x`, in case that very tensor comes next."""
        self._input, self._output = x, normed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known, output = self._input, self._output
        self._input = self._output = None
        if known is x and output is not None:
            return output
        return super().forward(x)


class FusedRotaryAttention(MergedAttention):
    """Attention with one product, one kernel for norms, rotation and the cache's write, and the paged cache."""

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
        metadata = context.metadata.of_group(cache.group)
        query = dispatch.rotary_and_cache(query, key, value, rotation, cache, metadata.slot_mapping)
        out = dispatch.paged_attention(query, cache, metadata, self.scoring)
        return self.o_proj(out.view(len(out), -1))[None], None


class PreNormLayer(nn.Module):
    """A decoder layer whose additions are fused into the norms that follow them, including the next layer's."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.input_layernorm: FusedRMSNorm = source.input_layernorm
        self.self_attn = source.self_attn
        self.post_attention_layernorm: FusedRMSNorm = source.post_attention_layernorm
        self.mlp = source.mlp
        self._next_norm: list[FusedRMSNorm] = []  # in a list, so that it is not registered as a child
        if hasattr(source, "attention_type"):  # models that mix windows look up a layer's mask by it
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
        mixed = self.mlp(normed_rows[None])
        out = (mixed[0] if isinstance(mixed, tuple) else mixed)[0]  # some mixtures return their weights, too
        if not self._next_norm:
            total: torch.Tensor = out + residual
            return total[None]
        (following,) = self._next_norm
        normed_rows, hidden_rows = dispatch.add_rms_norm(out, residual, following.weight, following.eps)
        hidden_states = hidden_rows[None]
        following.hold(hidden_states, normed_rows[None])
        return hidden_states


class CudaFusion(Fusion):
    """Fusion that turns a layer into four products and five kernels."""

    norm_class, attention_class = FusedRMSNorm, FusedRotaryAttention

    def __init__(self, traits: DecoderTraits, make_product: MakeProduct) -> None:
        super().__init__(traits, make_product, dispatch)

    def pre_norm_layer(self, layer: Any) -> nn.Module:
        return PreNormLayer(layer)

    def finish(self, decoder: Any) -> None:
        """Give each layer the norm that reads its output: the next layer's, or the one after the last."""
        if self.traits.residual == "pre_norm":
            norms = [*(layer.input_layernorm for layer in decoder.layers[1:]), decoder.norm]
            for layer, norm in zip(decoder.layers, norms, strict=True):
                layer.add_next_norm(norm)
