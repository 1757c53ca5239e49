"""Rewrites a loaded model in place for speed: merged and prepacked products, fused row operators.

The model stays transformers' own; a rewritten module computes what it replaces, to rounding. Modules are known by
their structure or their class, and whatever is not known stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagemill.engine.layers.attention import attend
from pagemill.engine.layers.decoder_layer import FusedDecoderLayer, can_be_compiled
from pagemill.engine.layers.faces import uses_cpu_kernels
from pagemill.engine.layers.linear import LinearOptions, make_linear, merged_linear
from pagemill.engine.layers.sharded_linear import PartialLinear, RowParallelLinear
from pagemill.kernels.types.scoring import Scoring

if TYPE_CHECKING:
    from pagemill.kernels.cpu.layer.layer import StepBuffers

# q, k, v projections (Phi 3: as one), optional q and k norms per head, rotation of pairs half a head apart.
ROTARY_ATTENTION = (
    "GemmaAttention",
    "Gemma2Attention",
    "Gemma3Attention",
    "LlamaAttention",
    "MistralAttention",
    "Phi3Attention",
    "Qwen2Attention",
    "Qwen3Attention",
    "SmolLM3Attention",
)
_WINDOW_IN_CONFIG = ("MistralAttention", "Phi3Attention")
RMS_NORM = (
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "Phi3RMSNorm",
    "Qwen2RMSNorm",
    "Qwen3RMSNorm",
    "SmolLM3RMSNorm",
)
# These multiply with 1 + weight.
OFFSET_RMS_NORM = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm")
# down_proj is one of these where the model is spread over several ranks.
_LINEAR = (nn.Linear, RowParallelLinear)


@dataclass(frozen=True, slots=True)
class FusionOptions:
    use_cpu_kernels: bool
    linear: LinearOptions
    step_buffers: StepBuffers | None
    """What the model's compiled layers share; None where there are none."""


def fuse(model: nn.Module, device: torch.device, dtype: torch.dtype, linear: LinearOptions) -> None:
    """Rewrite the model's modules. Its weights move into the new modules; the old ones are dropped."""
    use_cpu_kernels, buffers = uses_cpu_kernels(device, dtype), None
    if use_cpu_kernels:
        from pagemill.kernels.cpu.layer.layer import StepBuffers

        buffers = StepBuffers()
    _fuse_children(model, FusionOptions(use_cpu_kernels, linear, buffers))
    if use_cpu_kernels:
        _mark_last_layer(model)


def _mark_last_layer(model: Any) -> None:
    last = model.config.get_text_config().num_hidden_layers - 1
    for layer in model.modules():
        if isinstance(layer, FusedDecoderLayer):
            layer.is_last = layer.layer_idx == last


def _fuse_children(parent: nn.Module, options: FusionOptions) -> None:
    for name, child in parent.named_children():
        replacement = _replacement(child, options)
        if replacement is not None:
            setattr(parent, name, replacement)
            child = replacement
        _fuse_children(child, options)
        if options.step_buffers is not None and can_be_compiled(child):
            setattr(parent, name, FusedDecoderLayer(child, options.step_buffers))


def _replacement(module: Any, options: FusionOptions) -> nn.Module | None:
    kind = type(module).__name__
    if options.use_cpu_kernels:
        from pagemill.kernels.cpu import fused_rows

        if kind in ROTARY_ATTENTION:
            return RotaryAttention(module, options.linear)
        if is_silu_gated(module):
            return SiluGatedMLP(module, options.linear, fused_rows.silu_and_mul)
        if kind in RMS_NORM + OFFSET_RMS_NORM:
            return RMSNorm(module, fused_rows.rms_norm)
    if isinstance(module, PartialLinear):
        module.pack(options.linear)
        return None
    if type(module) is nn.Linear or kind == "FalconLinear":
        return make_linear(module.weight, module.bias, options.linear)
    if kind == "Conv1D":  # GPT-2's name for a linear layer that keeps its weight transposed
        return make_linear(module.weight.t(), module.bias, options.linear)
    return None


def _fast_linear(layer: nn.Linear, linear: LinearOptions) -> nn.Module:
    return make_linear(layer.weight, layer.bias, linear) or layer


def is_silu_gated(module: nn.Module) -> bool:
    """Known by its layers: gate and up apart, or (Phi 3) as one."""
    apart = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    merged = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    return any(all(type(layer) in _LINEAR for layer in layers) for layers in (apart, merged)) and (
        isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    )


class RMSNorm(nn.Module):
    """x / rms(x) * weight in one pass."""

    def __init__(
        self, source: Any, rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    ) -> None:
        super().__init__()
        self._rms_norm = rms_norm
        is_offset = type(source).__name__ in OFFSET_RMS_NORM
        self.weight = (
            nn.Parameter(1.0 + source.weight.float(), requires_grad=False) if is_offset else source.weight
        )
        self.eps = float(source.eps if is_offset else source.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._rms_norm(rows, self.weight, self.eps).view(x.shape)


class SiluGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up as one product."""

    def __init__(
        self, source: Any, linear: LinearOptions, silu_and_mul: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self._silu_and_mul = silu_and_mul
        if hasattr(source, "gate_up_proj"):
            self.gate_up_proj = _fast_linear(source.gate_up_proj, linear)
        else:
            self.gate_up_proj = merged_linear([source.gate_proj, source.up_proj], linear)
        self.down_proj = source.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x.reshape(-1, x.shape[-1]))
        out: torch.Tensor = self.down_proj(self._silu_and_mul(gate_up))
        return out.view(x.shape)


class MergedAttention(nn.Module):
    """One of `ROTARY_ATTENTION` with its projections as one product; what comes after it is a subclass's."""

    def __init__(self, source: Any, linear: LinearOptions) -> None:
        super().__init__()
        self.layer_idx: int = source.layer_idx
        self.head_dim: int = source.head_dim
        # Counted in the layers: a rank has some of the configuration's heads.
        self.num_heads: int = source.o_proj.in_features // self.head_dim
        self.num_kv_heads: int = source.config.num_key_value_heads
        if hasattr(source, "k_proj"):
            self.num_kv_heads = source.k_proj.out_features // self.head_dim
        windows = source.config if type(source).__name__ in _WINDOW_IN_CONFIG else source
        self.scoring = Scoring(
            float(source.scaling),
            alibi_slopes=getattr(source, "alibi_slopes", None),
            sliding_window=getattr(windows, "sliding_window", None),
            # Gemma 3 carries the setting along and does not use it.
            softcap=source.attn_logit_softcapping if type(source).__name__ == "Gemma2Attention" else None,
        )
        self.rotates = self.scoring.alibi_slopes is None and bool(getattr(source, "use_rope", True))
        if hasattr(source, "qkv_proj"):
            self.qkv_proj = _fast_linear(source.qkv_proj, linear)
        else:
            self.qkv_proj = merged_linear([source.q_proj, source.k_proj, source.v_proj], linear)
        self.o_proj = source.o_proj
        self.q_norm = getattr(source, "q_norm", None)
        self.k_norm = getattr(source, "k_norm", None)

    def project(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [num_tokens, heads, head_dim] of rows [num_tokens, hidden_size]."""
        qkv = self.qkv_proj(rows).view(len(rows), -1, self.head_dim)
        query, key, value = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return query, key, value


class RotaryAttention(MergedAttention):
    """Projections as one product, rotation in place, paged attention."""

    def __init__(self, source: Any, linear: LinearOptions) -> None:
        super().__init__(source, linear)
        from pagemill.kernels.cpu import fused_rows

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
