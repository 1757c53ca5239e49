"""A model family: LLaMA's layout with a model type unknown to Pagemill and transformers."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from pagemill.engine.models.families.llama_like import like_llama, llama_config


def build(raw: Any) -> PretrainedConfig:
    """Read config.json."""
    return llama_config(raw)


FAMILY = like_llama("Example", "example_llama", "ExampleForCausalLM", build_config=build)
