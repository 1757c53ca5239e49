"""MPT. transformers' attention adds a bias tensor; here the kernel computes the biases.

transformers reads more settings than it uses. Those that would change the output are rejected, except for the
largest bias, which is supported (MPT-7B-StoryWriter was trained with 16 instead of 8).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from pagemill.engine.layers.attention import attend
from pagemill.engine.layers.positions.alibi import mpt_alibi_slopes
from pagemill.engine.layers.share import CHANNELS, INPUTS, MERGED_QKV, TensorSplit
from pagemill.engine.models.families.family import (
    Family,
    RawConfig,
    native_config,
    replace_attention,
    require,
)
from pagemill.kernels.types.scoring import Scoring

_REQUIRED_SETTINGS = {"no_bias": True, "expansion_ratio": 4, "logit_scale": None}
_REQUIRED_ATTENTION_SETTINGS = {
    "alibi": True,
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "rope": False,
    "attn_uses_sequence_id": False,
}
_NORMS = ("layernorm", "low_precision_layernorm")


def _build_config(raw: RawConfig) -> PretrainedConfig:
    attention = raw.get("attn_config") or {}
    for settings, required in ((raw, _REQUIRED_SETTINGS), (attention, _REQUIRED_ATTENTION_SETTINGS)):
        for name, value in required.items():
            found = settings.get(name, value)
            require(found == value, f"MPT with {name}={found!r} is not supported, only {name}={value!r}")
    norm = raw.get("norm_type", _NORMS[0])
    require(norm in _NORMS, f"MPT with norm_type={norm!r} is not supported, only {' and '.join(_NORMS)}")
    return native_config(raw)


def _forward(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    qkv = self.Wqkv(hidden_states[0])
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (x.unflatten(-1, (self.n_heads, self.head_dim)) for x in qkv.chunk(3, dim=-1))
    scoring = Scoring(self.softmax_scale, alibi_slopes=self.alibi_slopes)
    out = attend(self.layer_idx, query, key, value, scoring)
    return self.out_proj(out.flatten(1))[None], None


def _adapt(module: nn.Module) -> None:
    from transformers.models.mpt.modeling_mpt import MptAttention

    model: Any = module
    attention = model.config.attn_config
    slopes = mpt_alibi_slopes(model.config.num_attention_heads, attention.alibi_bias_max)
    for child in replace_attention(module, MptAttention, forward=_forward):
        child.register_buffer("alibi_slopes", slopes, persistent=False)
    # Neither the biases nor the mask are read any more. A four-dimensional mask is passed through unchanged.
    model.transformer.build_mpt_alibi_tensor = lambda *_, **__: None
    mask = torch.empty(1, 1, 1, 0)
    model.transformer.register_forward_pre_hook(
        lambda _module, args, kwargs: (args, kwargs | {"attention_mask": mask}), with_kwargs=True
    )


_SPLIT = TensorSplit(
    layers={
        "blocks.*.attn.Wqkv": MERGED_QKV,
        "blocks.*.attn.out_proj": INPUTS,
        "blocks.*.ffn.up_proj": CHANNELS,
        "blocks.*.ffn.down_proj": INPUTS,
    },
    intermediate_size=lambda config: 4 * int(config.hidden_size),
    head_counts=("n_heads",),
)

MPT = Family(
    name="MPT",
    model_types=("mpt",),
    architectures=("MptForCausalLM", "MPTForCausalLM"),
    build_config=_build_config,
    adapt=_adapt,
    has_attention_interface=False,
    split=_SPLIT,
    extrapolates=lambda _config: True,
)
