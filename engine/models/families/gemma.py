"""Gemma 1, 2 and 3, text in and text out. Of a Gemma 3 with eyes, the language model alone is loaded."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3TextConfig, PretrainedConfig

from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.models.families.family import Family, RawConfig, Tensors, native_config, require

# The language model's tensors, as the first release and as transformers 5 name them.
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


_GEMMA3_DECODER = DecoderTraits(
    norm="offset_rms", residual="sandwich", rotation="by_layer_type", is_plain=False
)

FAMILIES = (
    Family(
        name="Gemma",
        model_types=("gemma",),
        architectures=("GemmaForCausalLM",),
        build_config=_build_config,
        decoder=DecoderTraits(norm="offset_rms"),
    ),
    Family(
        name="Gemma 2",
        model_types=("gemma2",),
        architectures=("Gemma2ForCausalLM",),
        build_config=_build_config,
        decoder=DecoderTraits(norm="offset_rms", residual="sandwich", has_softcap=True, is_plain=False),
    ),
    Family(
        name="Gemma 3",
        model_types=("gemma3_text",),
        architectures=("Gemma3ForCausalLM",),
        build_config=_build_config,
        decoder=_GEMMA3_DECODER,
    ),
    Family(
        name="Gemma 3 with vision (text only)",
        model_types=("gemma3",),
        architectures=("Gemma3ForConditionalGeneration",),
        build_config=_build_multimodal_config,
        convert_tensors=_convert_multimodal_tensors,
        decoder=_GEMMA3_DECODER,
    ),
)
