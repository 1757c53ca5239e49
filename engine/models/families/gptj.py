"""GPT-J. Its rotation of neighbouring pairs stays transformers'; only the attention product is replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.attention import attend
from pagemill.engine.models.families.family import Family, replace_attention
from pagemill.kernels.types.scoring import Scoring


def _attend(
    self: Any,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim], rotated
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend(self.layer_idx, query, key, value, Scoring(1.0 / self.scale_attn))
    return out.transpose(0, 1)[None], None


def _adapt(module: nn.Module) -> None:
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    replace_attention(module, GPTJAttention, _attn=_attend)


GPTJ = Family(
    name="GPT-J",
    model_types=("gptj",),
    architectures=("GPTJForCausalLM",),
    adapt=_adapt,
    has_attention_interface=False,
)
