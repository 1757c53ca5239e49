"""Rewrites a loaded model in place for speed: merged and prepacked products, fused row operators.

The model stays transformers' own; a rewritten module computes what it replaces, to rounding. Modules are known by
their structure or their class, and whatever is not known stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.execution.attention import attend
from engine.execution.device_tuning import uses_cpu_kernels
from engine.execution.packed_linear import PackedLinear, can_pack, merged_linear

# Separate q, k, v projections, optional q and k norms per head, rotation of pairs half a head apart.
_ROTARY_ATTENTION = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")
_RMS_NORM = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


def fuse(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Rewrite the model's modules. Its weights move into the new modules; the old ones are dropped."""
    _fuse_children(model, use_cpu_kernels=uses_cpu_kernels(device, dtype))


def _fuse_children(parent: nn.Module, *, use_cpu_kernels: bool) -> None:
    for name, child in parent.named_children():
        replacement = _replacement(child, use_cpu_kernels=use_cpu_kernels)
        if replacement is not None:
            setattr(parent, name, replacement)
            child = replacement
        _fuse_children(child, use_cpu_kernels=use_cpu_kernels)


def _replacement(module: nn.Module, *, use_cpu_kernels: bool) -> nn.Module | None:
    kind = type(module).__name__
    if kind in _ROTARY_ATTENTION and use_cpu_kernels:
        return RotaryAttention(module)
    if use_cpu_kernels and _is_silu_gated(module):
        return SiluGatedMLP(module)
    if kind in _RMS_NORM and use_cpu_kernels:
        return RMSNorm(module)
    if type(module) is nn.Linear and can_pack(module.weight):
        return PackedLinear(module.weight, module.bias)
    return None


def _is_silu_gated(module: nn.Module) -> bool:
    layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = getattr(module, "act_fn", None)
    return all(type(layer) is nn.Linear for layer in layers) and (
        isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    )


class RMSNorm(nn.Module):
    """x / rms(x) * weight in one pass."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        from kernels import cpu_fused

        self._rms_norm = cpu_fused.rms_norm
        self.weight = source.weight
        self._eps = float(source.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._rms_norm(rows, self.weight, self._eps).view(x.shape)


class SiluGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        from kernels import cpu_fused

        self._silu_and_mul = cpu_fused.silu_and_mul
        self.gate_up_proj = merged_linear([source.gate_proj, source.up_proj])
        self.down_proj = source.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x.reshape(-1, x.shape[-1]))
        out: torch.Tensor = self.down_proj(self._silu_and_mul(gate_up))
        return out.view(x.shape)


class RotaryAttention(nn.Module):
    """Projections as one product, rotation in place, paged attention."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        from kernels import cpu_fused

        self._rotate = cpu_fused.rotary_embedding
        self.layer_idx: int = source.layer_idx
        self._head_dim: int = source.head_dim
        self._num_heads: int = source.q_proj.out_features // source.head_dim
        self._num_kv_heads: int = source.k_proj.out_features // source.head_dim
        self._scale = float(source.scaling)
        self._sliding_window = getattr(source, "sliding_window", None)
        if self._sliding_window is None and type(source).__name__ == "MistralAttention":
            self._sliding_window = getattr(source.config, "sliding_window", None)
        self.qkv_proj = merged_linear([source.q_proj, source.k_proj, source.v_proj])
        self.o_proj = source.o_proj
        self.q_norm = getattr(source, "q_norm", None)
        self.k_norm = getattr(source, "k_norm", None)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, num_tokens, hidden_size]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos, sin [1, num_tokens, head_dim]
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        num_tokens = hidden_states.shape[1]
        qkv = self.qkv_proj(hidden_states[0]).view(num_tokens, -1, self._head_dim)
        query, key, value = qkv.split([self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = position_embeddings
        self._rotate(query, key, cos[0], sin[0])
        out = attend(
            self.layer_idx, query, key, value, scale=self._scale, sliding_window=self._sliding_window
        )
        return self.o_proj(out.view(num_tokens, -1))[None], None
