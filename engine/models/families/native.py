"""Families that transformers implements with its attention interface, in layouts other than LLaMA's."""

from __future__ import annotations

from typing import Any

from torch import nn

from pagemill.engine.models.families.family import Family


def _bigcode_kv_heads(config: Any) -> int:
    return 1 if config.multi_query else int(config.num_attention_heads)


def _use_linear_layers(module: nn.Module) -> None:
    """Replace GPT-2's linear layers, a separate class with transposed weights; nothing is copied."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Conv1D):
                setattr(parent, name, linear := nn.Linear(child.nx, child.nf, device="meta"))
                linear.weight, linear.bias = nn.Parameter(child.weight.t(), requires_grad=False), child.bias


FAMILIES = (
    Family(name="GPT-2", model_types=("gpt2",), architectures=("GPT2LMHeadModel",), adapt=_use_linear_layers),
    Family(
        name="GPT BigCode (StarCoder, SantaCoder)",
        model_types=("gpt_bigcode",),
        architectures=("GPTBigCodeForCausalLM",),
        num_kv_heads=_bigcode_kv_heads,
    ),
    Family(
        name="GPT-NeoX (Pythia, Dolly, StableLM alpha)",
        model_types=("gpt_neox",),
        architectures=("GPTNeoXForCausalLM",),
    ),
    Family(name="OPT", model_types=("opt",), architectures=("OPTForCausalLM",)),
)
