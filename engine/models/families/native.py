"""Families whose modules transformers has and whose attention goes through its interface: nothing to map."""

from __future__ import annotations

from typing import Any

from pagemill.engine.models.families.family import Family


def _bigcode_kv_heads(config: Any) -> int:
    return 1 if config.multi_query else int(config.num_attention_heads)


GPT2 = Family(name="GPT-2", model_types=("gpt2",), architectures=("GPT2LMHeadModel",))
GPT_BIGCODE = Family(
    name="GPT BigCode (StarCoder, SantaCoder)",
    model_types=("gpt_bigcode",),
    architectures=("GPTBigCodeForCausalLM",),
    num_kv_heads=_bigcode_kv_heads,
)
GPT_NEOX = Family(
    name="GPT-NeoX (Pythia, Dolly, StableLM alpha)",
    model_types=("gpt_neox",),
    architectures=("GPTNeoXForCausalLM",),
)
LLAMA = Family(
    name="LLaMA, LLaMA 2, Llama 3, SmolLM, SmolLM2",
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
)
MISTRAL = Family(name="Mistral", model_types=("mistral",), architectures=("MistralForCausalLM",))
OPT = Family(name="OPT", model_types=("opt",), architectures=("OPTForCausalLM",))
QWEN2 = Family(name="Qwen2, Qwen2.5", model_types=("qwen2",), architectures=("Qwen2ForCausalLM",))
QWEN3 = Family(name="Qwen3", model_types=("qwen3",), architectures=("Qwen3ForCausalLM",))
SMOLLM3 = Family(name="SmolLM3", model_types=("smollm3",), architectures=("SmolLM3ForCausalLM",))
