"""GPT-J. Its rotation of neighbouring pairs stays transformers'; only the attention product is replaced."""

from __future__ import annotations

from torch import nn

from pagemill.engine.execution.families.family import Family


def _adapt(module: nn.Module) -> None:
    from transformers.models.gptj.modeling_gptj import GPTJAttention

    from pagemill.engine.execution.families.gptj_attention import PagedGPTJAttention

    for child in module.modules():
        if isinstance(child, GPTJAttention):
            child.__class__ = PagedGPTJAttention


GPTJ = Family(
    name="GPT-J",
    model_types=("gptj",),
    architectures=("GPTJForCausalLM",),
    adapt=_adapt,
    has_attention_interface=False,
)
