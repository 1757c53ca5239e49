"""Families whose modules compute attention themselves: GPT-J, CodeGen, GPT-Neo, XGLM.

GPT-J and GPT-Neo do so in a method with queries, keys and values (rotated if applicable); only it is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from pagemill.engine.layers.attention import attend
from pagemill.engine.layers.share import CHANNELS, INPUTS, TensorSplit
from pagemill.engine.models.families.family import (
    Family,
    RawConfig,
    native_config,
    replace_attention,
    require,
)
from pagemill.engine.models.families.native import gpt2_intermediate_size
from pagemill.kernels.types.scoring import Scoring

_CODEGEN_BLOCKS = 4
"""Its projections are grouped by the cores it was trained on: queries, values and keys of a quarter of the heads."""


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


def _forward_codegen(
    self: Any, hidden_states: torch.Tensor, *_: Any, position_ids: torch.Tensor, **__: Any
) -> tuple[torch.Tensor, None]:
    num_tokens = hidden_states.shape[1]
    blocks = self.qkv_proj(hidden_states[0]).view(num_tokens, -1, 3, self.block_width)
    query, value, key = (x.reshape(1, num_tokens, -1, self.head_dim) for x in blocks.unbind(2))
    sin, cos = self.embed_positions[position_ids].to(key.dtype).chunk(2, dim=-1)
    width = self.rotary_dim or self.head_dim
    query, key = (
        torch.cat([self.rotate(x[..., :width], sin, cos), x[..., width:]], dim=-1) for x in (query, key)
    )
    out = attend(self.layer_idx, query[0], key[0], value[0], self.scoring)
    return self.out_proj(out.flatten(1))[None], None


def _adapt_codegen(module: nn.Module) -> None:
    from transformers.models.codegen.modeling_codegen import CodeGenAttention, apply_rotary_pos_emb

    rotate = staticmethod(apply_rotary_pos_emb)
    for attention in replace_attention(module, CodeGenAttention, forward=_forward_codegen, rotate=rotate):
        attention.scoring = Scoring(1.0 / attention.scale_attn)
        attention.block_width = attention.embed_dim // _CODEGEN_BLOCKS


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


def _split(attention: str, mlp: tuple[str, str], **more: Any) -> TensorSplit:
    """Return the split of separate projections; the names are relative to a layer."""
    projections = {f"{attention}.{name}_proj": CHANNELS for name in "qkv"}
    into, out = mlp
    return TensorSplit(
        layers={**projections, f"{attention}.out_proj": INPUTS, into: CHANNELS, out: INPUTS}, **more
    )


_GPTJ_SPLIT = _split(
    "h.*.attn",
    ("h.*.mlp.fc_in", "h.*.mlp.fc_out"),
    intermediate_size=gpt2_intermediate_size,
    head_counts=("num_attention_heads",),
)
_CODEGEN_SPLIT = TensorSplit(
    layers={
        "h.*.attn.qkv_proj": CHANNELS,
        "h.*.attn.out_proj": INPUTS,
        "h.*.mlp.fc_in": CHANNELS,
        "h.*.mlp.fc_out": INPUTS,
    },
    intermediate_size=gpt2_intermediate_size,
    blocks=lambda _config: _CODEGEN_BLOCKS,
)
_GPT_NEO_SPLIT = _split(
    "h.*.attn.attention",
    ("h.*.mlp.c_fc", "h.*.mlp.c_proj"),
    intermediate_size=lambda config: int(config.intermediate_size or 4 * config.hidden_size),
    head_counts=("num_heads",),
)
_XGLM_SPLIT = _split(
    "layers.*.self_attn",
    ("layers.*.fc1", "layers.*.fc2"),
    intermediate_size=lambda config: int(config.ffn_dim),
    head_counts=("num_heads",),
)

FAMILIES = (
    Family(
        name="CodeGen",
        model_types=("codegen",),
        architectures=("CodeGenForCausalLM",),
        adapt=_adapt_codegen,
        has_attention_interface=False,
        split=_CODEGEN_SPLIT,
    ),
    Family(
        name="GPT-J",
        model_types=("gptj",),
        architectures=("GPTJForCausalLM",),
        adapt=_adapt_gptj,
        has_attention_interface=False,
        split=_GPTJ_SPLIT,
    ),
    Family(
        name="GPT-Neo",
        model_types=("gpt_neo",),
        architectures=("GPTNeoForCausalLM",),
        adapt=_adapt_gpt_neo,
        has_attention_interface=False,
        split=_GPT_NEO_SPLIT,
    ),
    Family(
        name="XGLM",
        model_types=("xglm",),
        architectures=("XGLMForCausalLM",),
        build_config=_build_xglm_config,
        adapt=_adapt_xglm,
        has_attention_interface=False,
        split=_XGLM_SPLIT,
    ),
)
