"""Aquila and Aquila2: a LLaMA under another name, its tensors' names included."""

from __future__ import annotations

from transformers import LlamaConfig, PretrainedConfig

from pagemill.engine.models.families.family import Family, RawConfig
from pagemill.engine.models.families.llama_like import shared_fields


def _build_config(raw: RawConfig) -> PretrainedConfig:
    config: PretrainedConfig = LlamaConfig.from_dict(shared_fields(raw))
    return config


AQUILA = Family(
    name="Aquila, Aquila2",
    model_types=("aquila",),
    architectures=("AquilaForCausalLM", "AquilaModel"),
    build_config=_build_config,
)
