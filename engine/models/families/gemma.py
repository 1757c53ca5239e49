"""Gemma 1, 2 and 3, text only."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.models.families.family import RawConfig, native_config, require
from pagemill.engine.models.families.llama_like import like_llama


def _build_config(raw: RawConfig) -> PretrainedConfig:
    return _causal(native_config(raw))


def _causal(config: Any) -> PretrainedConfig:
    require(
        not getattr(config, "use_bidirectional_attention", None),
        "Gemma with use_bidirectional_attention is an embedding model: it generates nothing",
    )
    assert isinstance(config, PretrainedConfig)
    return config


_GEMMA = DecoderTraits(norm="offset_rms")
_GEMMA2 = DecoderTraits(norm="offset_rms", residual="sandwich", has_softcap=True, is_plain=False)
_GEMMA3 = DecoderTraits(norm="offset_rms", residual="sandwich", rotation="by_layer_type", is_plain=False)

FAMILIES = (
    like_llama("Gemma", "gemma", "GemmaForCausalLM", decoder=_GEMMA, build_config=_build_config),
    like_llama("Gemma 2", "gemma2", "Gemma2ForCausalLM", decoder=_GEMMA2, build_config=_build_config),
    like_llama("Gemma 3", "gemma3_text", "Gemma3ForCausalLM", decoder=_GEMMA3, build_config=_build_config),
)
