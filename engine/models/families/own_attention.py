"""Families whose modules compute attention themselves: GPT-J, CodeGen, GPT-Neo, XGLM.

All but XGLM do so in a method that takes queries, keys and values, rotated if they are; it alone is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from pagemill.engine.layers.attention import attend
from pagemill.engine.models.families.family import (
    Family,
    RawConfig,
    native_config,
    replace_attention,
    require,
)
from pagemill.kernels.types.scoring import Scoring


def _attend(
    self: Any,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim], rotated
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attend(self.layer_idx, query, key, value, self.scoring)
    return out.transpose(0, 1)[None], None


def _adapt_gptj(module: nn.Module) -> None:
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    for attention in replace_attention(module, GPTJAttention, _attn=_attend):
        attention.scoring = Scoring(1.0 / attention.scale_attn)


def _adapt_codegen(module: nn.Module) -> None:
    from transformers.models.codegen.modeling_codegen import CodeGenAttention

    for attention in replace_attention(module, CodeGenAttention, _attn=_attend):
        attention.scoring = Scoring(1.0 / attention.scale_attn)


def _adapt_gpt_neo(module: nn.Module) -> None:
    from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

    for attention in replace_attention(module, GPTNeoSelfAttention, _attn=_attend):
        attention.layer_idx = attention.layer_id
        window = attention.config.window_size if attention.attention_type == "local" else None
        attention.scoring = Scoring(1.0, sliding_window=window)  # the weights were trained unscaled


def _build_xglm_config(raw: RawConfig) -> PretrainedConfig:
    require(not raw.get("add_cross_attention"), "XGLM with add_cross_attention is not supported")
    return native_config(raw)


def _forward_xglm(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    rows = hidden_states[0]
    query, key, value = (
        project(rows).unflatten(-1, (self.num_heads, self.head_dim))
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    out = attend(self.layer_idx, query, key, value, Scoring(self.scaling))
    return self.out_proj(out.flatten(1))[None], None


def _adapt_xglm(module: nn.Module) -> None:
    from transformers.models.xglm.modeling_xglm import XGLMAttention

    replace_attention(module, XGLMAttention, forward=_forward_xglm)


FAMILIES = (
    Family(
        name="CodeGen",
        model_types=("codegen",),
        architectures=("CodeGenForCausalLM",),
        adapt=_adapt_codegen,
        has_attention_interface=False,
    ),
    Family(
        name="GPT-J",
        model_types=("gptj",),
        architectures=("GPTJForCausalLM",),
        adapt=_adapt_gptj,
        has_attention_interface=False,
    ),
    Family(
        name="GPT-Neo",
        model_types=("gpt_neo",),
        architectures=("GPTNeoForCausalLM",),
        adapt=_adapt_gpt_neo,
        has_attention_interface=False,
    ),
    Family(
        name="XGLM",
        model_types=("xglm",),
        architectures=("XGLMForCausalLM",),
        build_config=_build_xglm_config,
        adapt=_adapt_xglm,
        has_attention_interface=False,
    ),
)
