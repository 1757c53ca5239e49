"""A decoder's modules on a CPU: compiled row operators, and complete compiled layers if possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.attention import attend
from pagemill.engine.layers.converted_products import ConvertedProduct
from pagemill.engine.layers.decoder_layer import FusedDecoderLayer, can_be_compiled
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.fusion import Fusion, MergedAttention, RMSNorm, SiluGatedMLP
from pagemill.engine.layers.linear import MakeProduct


class RotaryAttention(MergedAttention):
    """Attention with one merged projection, in-place rotation and the paged cache."""

    def __init__(self, source: Any, traits: DecoderTraits, make_product: MakeProduct) -> None:
        super().__init__(source, traits, make_product)
        from pagemill.kernels.cpu import fused_rows

        # Matmuls round their rows to at most bfloat16's precision, so attention does the same.
        rounds = isinstance(self.qkv_proj.product, ConvertedProduct)
        self.scoring = replace(self.scoring, rounds_to_cache=rounds)
        self._rotate = fused_rows.rotary_embedding

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos, sin [1, num_tokens, head_dim]
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self.project(hidden_states[0])
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.rotates:
            cos, sin = position_embeddings
            self._rotate(query, key, cos[0], sin[0])
        out = attend(self.layer_idx, query, key, value, self.scoring)
        return self.o_proj(out.view(len(out), -1))[None], None


class CpuFusion(Fusion):
    """Fusion for fp32, with Pagemill's kernels."""

    norm_class, attention_class, mlp_class = RMSNorm, RotaryAttention, SiluGatedMLP

    def __init__(self, traits: DecoderTraits, make_product: MakeProduct) -> None:
        from pagemill.kernels.cpu import fused_rows
        from pagemill.kernels.cpu.layer.step_buffers import StepBuffers

        super().__init__(traits, make_product, fused_rows)
        self._buffers = StepBuffers()

    def pre_norm_layer(self, layer: Any) -> nn.Module:
        return FusedDecoderLayer(layer, self._buffers) if can_be_compiled(layer) else layer

    def finish(self, decoder: Any) -> None:
        if isinstance(last := decoder.layers[-1], FusedDecoderLayer):
            last.is_last = True
