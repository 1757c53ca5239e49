"""Gemma 1, 2 and 3, text in and text out. Of a multimodal Gemma 3, only the language model is loaded."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3TextConfig, PretrainedConfig

from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.models.families.family import RawConfig, Tensors, native_config, require
from pagemill.engine.models.families.llama_like import like_llama

# The language model's tensors, as named by the first release and by transformers 5.
_TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model."}
_HEAD_NAMES = ("language_model.lm_head.weight", "lm_head.weight")


def _build_config(raw: RawConfig) -> PretrainedConfig:
    return _causal(native_config(raw))


def _build_multimodal_config(raw: RawConfig) -> PretrainedConfig:
    text = raw.get("text_config")
    require(isinstance(text, dict), "config.json of model type 'gemma3' lacks text_config")
    assert isinstance(text, dict)
    inherited = {name: raw[name] for name in ("torch_dtype", "dtype") if name in raw}
    return _causal(Gemma3TextConfig.from_dict(inherited | text))


def _causal(config: Any) -> PretrainedConfig:
    require(
        not getattr(config, "use_bidirectional_attention", None),
        "Gemma with use_bidirectional_attention is an embedding model: it generates nothing",
    )
    assert isinstance(config, PretrainedConfig)
    return config


def _convert_multimodal_tensors(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    out: Tensors = {}
    for name, tensor in tensors.items():
        if name in _HEAD_NAMES:
            out["lm_head.weight"] = tensor
        for prefix, replacement in _TEXT_PREFIXES.items():
            if name.startswith(prefix):
                out[replacement + name.removeprefix(prefix)] = tensor
    return out


_GEMMA = DecoderTraits(norm="offset_rms")
_GEMMA2 = DecoderTraits(norm="offset_rms", residual="sandwich", has_softcap=True, is_plain=False)
_GEMMA3 = DecoderTraits(norm="offset_rms", residual="sandwich", rotation="by_layer_type", is_plain=False)

FAMILIES = (
    like_llama("Gemma", "gemma", "GemmaForCausalLM", decoder=_GEMMA, build_config=_build_config),
    like_llama("Gemma 2", "gemma2", "Gemma2ForCausalLM", decoder=_GEMMA2, build_config=_build_config),
    like_llama("Gemma 3", "gemma3_text", "Gemma3ForCausalLM", decoder=_GEMMA3, build_config=_build_config),
    like_llama(
        "Gemma 3 with vision (text only)",
        "gemma3",
        "Gemma3ForConditionalGeneration",
        decoder=_GEMMA3,
        build_config=_build_multimodal_config,
        convert_tensors=_convert_multimodal_tensors,
    ),
)
