"""Families that transformers implements with its attention interface, in layouts other than LLaMA's."""

from __future__ import annotations

from typing import Any

from torch import nn

from pagemill.engine.layers.share import CHANNELS, INPUTS, MERGED_QKV, QKV_BY_KV_HEAD, TensorSplit
from pagemill.engine.models.families.family import Family


def _bigcode_kv_heads(config: Any) -> int:
    return 1 if config.multi_query else int(config.num_attention_heads)


def gpt2_intermediate_size(config: Any) -> int:
    return int(config.n_inner or 4 * config.hidden_size)


def _use_linear_layers(module: nn.Module) -> None:
    """Replace GPT-2's linear layers, a separate class with transposed weights; nothing is copied."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Conv1D):
                setattr(parent, name, linear := nn.Linear(child.nx, child.nf, device="meta"))
                linear.weight, linear.bias = nn.Parameter(child.weight.t(), requires_grad=False), child.bias


_GPT2_SPLIT = TensorSplit(
    layers={
        "h.*.attn.c_attn": MERGED_QKV,
        "h.*.attn.c_proj": INPUTS,
        "h.*.mlp.c_fc": CHANNELS,
        "h.*.mlp.c_proj": INPUTS,
    },
    intermediate_size=gpt2_intermediate_size,
    head_widths=("split_size",),
    has_transposed_weights=True,
)
_BIGCODE_SPLIT = TensorSplit(
    layers={**_GPT2_SPLIT.layers, "h.*.attn.c_attn": QKV_BY_KV_HEAD},
    intermediate_size=gpt2_intermediate_size,
    head_counts=("num_heads",),
    head_widths=("embed_dim",),
)
_OPT_SPLIT = TensorSplit(
    layers={
        "layers.*.self_attn.q_proj": CHANNELS,
        "layers.*.self_attn.k_proj": CHANNELS,
        "layers.*.self_attn.v_proj": CHANNELS,
        "layers.*.self_attn.out_proj": INPUTS,
        "layers.*.fc1": CHANNELS,
        "layers.*.fc2": INPUTS,
    },
    intermediate_size=lambda config: int(config.ffn_dim),
    head_counts=("num_heads",),
)

FAMILIES = (
    Family(
        name="GPT-2",
        model_types=("gpt2",),
        architectures=("GPT2LMHeadModel",),
        adapt=_use_linear_layers,
        split=_GPT2_SPLIT,
    ),
    Family(
        name="GPT BigCode (StarCoder, SantaCoder)",
        model_types=("gpt_bigcode",),
        architectures=("GPTBigCodeForCausalLM",),
        num_kv_heads=_bigcode_kv_heads,
        split=_BIGCODE_SPLIT,
    ),
    Family(
        name="GPT-NeoX (Pythia, Dolly, StableLM alpha)",
        model_types=("gpt_neox",),
        architectures=("GPTNeoXForCausalLM",),
    ),
    Family(name="OPT", model_types=("opt",), architectures=("OPTForCausalLM",), split=_OPT_SPLIT),
)
