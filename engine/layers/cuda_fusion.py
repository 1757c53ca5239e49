"""A decoder's modules on CUDA: merged matmuls, and the fused kernels around them.

The operators come from `pagemill.kernels.dispatch`, so the rewritten model computes the same on any device,
but is faster only on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.attention import current_context
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.fusion import Fusion, MergedAttention, RMSNorm, SiluGatedMLP
from pagemill.engine.layers.linear import Linear, MakeProduct, has_adapter_rows
from pagemill.kernels import dispatch
from pagemill.kernels.types.rotation import Rotation
from pagemill.kernels.types.scaled_rows import ScaledRows


def _keeps_rows() -> bool:
    """Return True in a step with adapters, which read rows before rounding."""
    return has_adapter_rows()


class FusedRMSNorm(RMSNorm):
    """An RMSNorm that rounds rows like their reader. Its output may be computed in advance."""

    _readers: tuple[Linear, ...] = ()  # a tuple, so that none is registered as a child
    _input: torch.Tensor | None = None
    _output: torch.Tensor | ScaledRows | None = None

    def read_by(self, linear: Linear) -> None:
        """Declare that only this layer reads what `normed` and `added` return."""
        self._readers = (linear,)

    def hold(self, x: torch.Tensor, rows: torch.Tensor | ScaledRows) -> None:
        """Store `rows` as the norm of `x`, in case the next call receives this tensor."""
        self._input, self._output = x, rows

    def normed(self, x: torch.Tensor) -> torch.Tensor | ScaledRows:
        """Return the norm of x [1, num_rows, size] in its reader's format, [num_rows, size]."""
        known, output = self._input, self._output
        self._input = self._output = None
        if known is x and output is not None:
            return output
        return self._rows(x[0], None)[0]

    def added(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor | ScaledRows, torch.Tensor]:
        """Return the norm of a sum of rows in its reader's format, and the sum."""
        return self._rows(x, residual)

    def _rows(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | ScaledRows, torch.Tensor]:
        for reader in self._readers:
            if (numbers := reader.rounds_to) is not None:
                return dispatch.norm_and_quantize(x, residual, self.weight, self.eps, numbers, _keeps_rows())
        if residual is None:
            return dispatch.rms_norm(x, self.weight, self.eps), x
        return dispatch.add_rms_norm(x, residual, self.weight, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known, output = self._input, self._output
        self._input = self._output = None
        if known is x and isinstance(output, torch.Tensor):
            return output.view(x.shape)
        return super().forward(x)


class RoundingMLP(SiluGatedMLP):
    """A gated MLP that rounds its activations like its last matmul."""

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor | ScaledRows:
        down: Linear = self.down_proj
        if down.rounds_to is None:
            return super().activated(gate_up)
        return dispatch.silu_and_quantize(gate_up, down.rounds_to, _keeps_rows())


class FusedRotaryAttention(MergedAttention):
    """Attention with one matmul, one kernel for norms, rotation and cache writes, and the paged cache."""

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
        return self.attend(hidden_states[0], position_embeddings)[None], None

    def attend(
        self, rows: torch.Tensor | ScaledRows, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return [num_tokens, hidden_size] for rows of that shape."""
        context = current_context()
        cache = context.layers[self.layer_idx]
        query, key, value = self.project(rows)
        rotation = self._rotation(position_embeddings)
        metadata = context.metadata.of_group(cache.group)
        query = dispatch.rotary_and_cache(query, key, value, rotation, cache, metadata.slot_mapping)
        out = dispatch.paged_attention(query, cache, metadata, self.scoring)
        attended: torch.Tensor = self.o_proj(out.view(len(out), -1))
        return attended


class PreNormLayer(nn.Module):
    """A decoder layer whose additions are fused into the norms that follow them, including the next layer's."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.input_layernorm: FusedRMSNorm = source.input_layernorm
        self.self_attn: FusedRotaryAttention = source.self_attn
        self.post_attention_layernorm: FusedRMSNorm = source.post_attention_layernorm
        self.mlp = source.mlp
        self.input_layernorm.read_by(self.self_attn.qkv_proj)
        if isinstance(self.mlp, SiluGatedMLP):
            self.post_attention_layernorm.read_by(self.mlp.gate_up_proj)
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
        rows = self.input_layernorm.normed(hidden_states)
        attended = self.self_attn.attend(rows, position_embeddings)
        rows, residual = self.post_attention_layernorm.added(attended, hidden_states[0])
        out = self.mlp(rows) if isinstance(self.mlp, SiluGatedMLP) else self._mixed(rows)
        if not self._next_norm:
            total: torch.Tensor = out + residual
            return total[None]
        (following,) = self._next_norm
        rows, hidden_rows = following.added(out, residual)
        hidden_states = hidden_rows[None]
        following.hold(hidden_states, rows)
        return hidden_states

    def _mixed(self, rows: torch.Tensor | ScaledRows) -> torch.Tensor:
        """Return the output of an MoE block; some also return router weights."""
        assert isinstance(rows, torch.Tensor), "a mixture reads no rounded rows"
        mixed = self.mlp(rows[None])
        out: torch.Tensor = (mixed[0] if isinstance(mixed, tuple) else mixed)[0]
        return out


class CudaFusion(Fusion):
    """Fusion that converts a layer into four matmuls and five kernels."""

    norm_class, attention_class, mlp_class = FusedRMSNorm, FusedRotaryAttention, RoundingMLP

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
