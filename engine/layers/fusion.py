"""Rewrites a loaded decoder in place for speed: merged matmuls and fused row operators.

The model remains transformers'; a rewritten module computes the same as the original, up to rounding. The
modules for each device are in `cpu_fusion.py` and `cuda_fusion.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.attention import padded_sinks
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.library import is_silu
from pagemill.engine.layers.linear import Linear, MakeProduct, replace_linears
from pagemill.kernels.types.scaled_rows import ScaledRows
from pagemill.kernels.types.scoring import Scoring


class Fusion:
    """Rewrites a decoder of known traits layer by layer, so that replaced modules are freed early."""

    norm_class: type[RMSNorm]
    attention_class: type[MergedAttention]
    mlp_class: type[SiluGatedMLP]

    def __init__(self, traits: DecoderTraits, make_product: MakeProduct, operators: Any) -> None:
        """`operators` has `rms_norm` and `silu_and_mul`."""
        self.traits, self.make_product, self.operators = traits, make_product, operators

    def run(self, decoder: Any) -> None:
        """Rewrite the modules of `decoder`. Its weights move into the new ones; the old ones are dropped."""
        norm_class = type(decoder.norm)
        for index, layer in enumerate(decoder.layers):
            layer.self_attn = self.attention_class(layer.self_attn, self.traits, self.make_product)
            for parent, name in _gated_mlps(layer):
                mlp = self.mlp_class(getattr(parent, name), self.make_product, self.operators.silu_and_mul)
                setattr(parent, name, mlp)
            for parent in (layer, layer.self_attn):
                for name, child in parent.named_children():
                    if type(child) is norm_class:
                        setattr(parent, name, self.norm(child))
            replace_linears(layer, self.make_product)
            if self.traits.residual == "pre_norm":
                decoder.layers[index] = self.pre_norm_layer(layer)
        decoder.norm = self.norm(decoder.norm)
        if self.traits.has_half_angles:
            decoder.rotary_emb = RepeatedAngles(decoder.rotary_emb)
        self.finish(decoder)

    def norm(self, source: Any) -> RMSNorm:
        return self.norm_class(source, self.traits, self.operators.rms_norm)

    def pre_norm_layer(self, layer: Any) -> nn.Module:
        """Return the replacement of a layer whose modules have been replaced, or the layer itself."""
        raise NotImplementedError

    def finish(self, decoder: Any) -> None:
        """Do the part that needs all layers."""
        raise NotImplementedError


def _gated_mlps(layer: Any) -> list[tuple[Any, str]]:
    """Return the attribute of a layer's MLP, or of the shared MLP of an MoE layer."""
    places = [(layer, "mlp"), *((layer.mlp, name) for name in ("shared_expert", "shared_experts"))]
    return [(parent, name) for parent, name in places if is_silu_gated(getattr(parent, name, None))]


def is_silu_gated(mlp: Any) -> bool:
    """Return True if an MLP is down(silu(gate) * up), with gate and up separate or (Phi 3) merged."""
    has_gate = hasattr(mlp, "gate_up_proj") or (hasattr(mlp, "gate_proj") and hasattr(mlp, "up_proj"))
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    return has_gate and hasattr(mlp, "down_proj") and is_silu(activation)


class RMSNorm(nn.Module):
    """x / rms(x) * weight in one pass."""

    def __init__(
        self,
        source: Any,
        traits: DecoderTraits,
        rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor],
    ) -> None:
        super().__init__()
        self._rms_norm = rms_norm
        self.weight = source.weight
        if traits.norm == "offset_rms":
            self.weight = nn.Parameter(1.0 + source.weight.float(), requires_grad=False)
        self.eps = float(source.variance_epsilon if hasattr(source, "variance_epsilon") else source.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._rms_norm(rows, self.weight, self.eps).view(x.shape)


class RepeatedAngles(nn.Module):
    """Half of a head's angles, duplicated, in the layout of the rotations."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.source(x, position_ids)
        return cos.repeat(1, 1, 2), sin.repeat(1, 1, 2)


class SiluGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up as one matmul."""

    def __init__(
        self, source: Any, make_product: MakeProduct, silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self._silu_and_mul = silu_and_mul
        merged = hasattr(source, "gate_up_proj")
        layers = [source.gate_up_proj] if merged else [source.gate_proj, source.up_proj]
        self.gate_up_proj = Linear.from_layers(layers, make_product)
        self.down_proj = source.down_proj

    def forward(self, x: torch.Tensor | ScaledRows) -> torch.Tensor:
        rows = x if isinstance(x, ScaledRows) else x.reshape(-1, x.shape[-1])
        out: torch.Tensor = self.down_proj(self.activated(self.gate_up_proj(rows)))
        return out.view(x.shape)

    def activated(self, gate_up: torch.Tensor) -> torch.Tensor | ScaledRows:
        """Return the input of the last matmul: silu(gate) * up."""
        return self._silu_and_mul(gate_up)


class MergedAttention(nn.Module):
    """Attention with its projections as one matmul; subclasses implement the rest."""

    def __init__(self, source: Any, traits: DecoderTraits, make_product: MakeProduct) -> None:
        super().__init__()
        self.layer_idx: int = source.layer_idx
        self.head_dim: int = source.head_dim
        # Derived from the layers: a rank has only some of the configuration's heads.
        self.num_heads: int = source.o_proj.in_features // self.head_dim
        self.num_kv_heads: int = source.config.num_key_value_heads
        if hasattr(source, "k_proj"):
            self.num_kv_heads = source.k_proj.out_features // self.head_dim
        windows = source.config if traits.window == "one" else source
        self.scoring = Scoring(
            float(source.scaling),
            alibi_slopes=getattr(source, "alibi_slopes", None),
            sliding_window=getattr(windows, "sliding_window", None),
            softcap=source.attn_logit_softcapping if traits.has_softcap else None,
            sinks=padded_sinks(source.sinks, self.num_heads) if hasattr(source, "sinks") else None,
        )
        self.rotates = self.scoring.alibi_slopes is None and bool(getattr(source, "use_rope", True))
        merged = hasattr(source, "qkv_proj")
        layers = [source.qkv_proj] if merged else [source.q_proj, source.k_proj, source.v_proj]
        self.qkv_proj = Linear.from_layers(layers, make_product)
        self.o_proj = source.o_proj
        self.q_norm = getattr(source, "q_norm", None)
        self.k_norm = getattr(source, "k_norm", None)

    def project(self, rows: torch.Tensor | ScaledRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values [num_tokens, heads, head_dim] of rows [num_tokens, hidden_size]."""
        qkv = self.qkv_proj(rows).view(len(rows), -1, self.head_dim)
        query, key, value = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return query, key, value
