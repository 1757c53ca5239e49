"""The text part of multimodal checkpoints: language models, loaded by the family of the text type.

To add a type, add a row to `_ROWS`. A text type that differs from another only in the positions of images is loaded
as the other (`_WITHOUT_IMAGES`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.families.family import Family, RawConfig, Tensors, require, unchanged

_NAMES = (
    (re.compile(r"^(language_model|model\.language_model|model)\.lm_head\."), "lm_head."),
    (
        re.compile(r"^(language_model\.model|model\.language_model|model\.text_model|language_model)\."),
        "model.",
    ),
)
"""The language model's tensors, as named by the first releases of these types and by transformers 5."""
_OWN_NAMES = re.compile(r"^(lm_head|model\.(layers|embed_tokens|norm))\.")
"""Prefixes of checkpoints with a text model's names; images' tensors are next to `model`."""
_PARTS_BESIDE = ("vision_config", "audio_config", "text_config", "architectures", "model_type", "auto_map")
_INHERITED = ("torch_dtype", "dtype")
_ROPE = ("rope_scaling", "rope_parameters")


def text_name(name: str) -> str | None:
    """Return a tensor's name in the language model; None: it belongs to images or audio."""
    for pattern, replacement in _NAMES:
        if match := pattern.match(name):
            return replacement + name[match.end() :]
    return name if _OWN_NAMES.match(name) else None


def _with_text_positions(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with plain rotation in place of M-RoPE.

    M-RoPE takes each frequency's angle from one of three positions. A text's three positions are equal.
    """
    for field in _ROPE:
        if isinstance(rope := config.get(field), dict):
            plain = {name: value for name, value in rope.items() if not name.startswith("mrope")}
            kinds = {name: "default" for name in ("type", "rope_type") if plain.get(name) == "mrope"}
            config[field] = plain | kinds
    return config


def _with_defaults(kind: str, config: RawConfig) -> dict[str, Any]:
    """Return a text's configuration with the defaults of its type. Raises `ModelLoadError`."""
    try:
        fields: dict[str, Any] = CONFIG_MAPPING[kind].from_dict(_with_text_positions(dict(config))).to_dict()
    except Exception as error:  # the file can make transformers' validation raise anything
        raise ModelLoadError(
            f"can't read text_config of config.json: {' '.join(str(error).split())}"
        ) from error
    return fields


def _with_experts_by_rows(tensors: Tensors, config: PretrainedConfig) -> Tensors:
    """Transpose experts stored with a row per input."""
    inputs = {"gate_up_proj": config.hidden_size, "down_proj": config.moe_intermediate_size}
    out: Tensors = {}
    for name, tensor in tensors.items():
        size = inputs.get(name.rpartition(".mlp.experts.")[2])
        is_by_inputs = size is not None and tensor.ndim == 3 and tensor.shape[1] == size
        out[name] = tensor.transpose(1, 2) if is_by_inputs else tensor
    return out


_WITHOUT_IMAGES: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}
"""The type with the same computation for texts, and fields that are constants of the text type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multimodal:
    """A row of docs/models.md."""

    name: str
    model_type: str
    architectures: tuple[str, ...]
    text_type: str
    """The `model_type` of a `text_config` without one."""
    is_flat: bool = False
    """True if first releases have the text's fields next to `vision_config`."""
    convert_tensors: Callable[[Tensors, PretrainedConfig], Tensors] = unchanged
    images: bool = False
    """True if `get_image_features` of transformers' model returns the complete input from a picture."""
    interleaved: bool = False
    """True if rotary frequencies use a token's three positions alternately, not in sections."""

    @property
    def loaded_type(self) -> str:
        """The type as which `text_type` is loaded."""
        return str(_WITHOUT_IMAGES.get(self.text_type, {}).get("model_type", self.text_type))

    def text_config(self, raw: RawConfig) -> dict[str, Any]:
        """Return the text model's config.json. Raises `ModelLoadError`."""
        text = raw.get("text_config")
        if text is None and self.is_flat:
            text = {name: value for name, value in raw.items() if name not in _PARTS_BESIDE}
        require(text is not None, f"config.json of model type {self.model_type!r} lacks text_config")
        require(isinstance(text, dict), f"text_config of model type {self.model_type!r} is not a JSON object")
        assert isinstance(text, dict)
        kind = text.get("model_type") or self.text_type
        kind = kind if kind in CONFIG_MAPPING else self.text_type
        inherited = {name: raw[name] for name in _INHERITED if name in raw}
        config = inherited | text | {"model_type": kind}
        config.pop("architectures", None)
        if (plain := _WITHOUT_IMAGES.get(kind)) is not None:
            config = _with_text_positions(_with_defaults(kind, config)) | plain
        if self._is_tied(raw, text):
            config["tie_word_embeddings"] = True
        elif "tie_word_embeddings" in raw:
            config["tie_word_embeddings"] = bool(raw["tie_word_embeddings"])
        return config

    def _is_tied(self, raw: RawConfig, text: RawConfig) -> bool:
        """Return True if the head is the embedding because the checkpoint lacks a head."""
        default = getattr(CONFIG_MAPPING[self.model_type], "tie_word_embeddings", False)
        return bool(raw.get("tie_word_embeddings", default) or text.get("tie_word_embeddings"))

    def family(self, text: Family) -> Family:
        """Return the family of this type, based on that of its text type."""

        def build_config(raw: RawConfig) -> PretrainedConfig:
            return text.build_config(self.text_config(raw))

        def convert_tensors(tensors: Tensors, config: PretrainedConfig) -> Tensors:
            return text.convert_tensors(self.convert_tensors(tensors, config), config)

        converts = (self.convert_tensors, text.convert_tensors) != (unchanged, unchanged)
        return replace(
            text,
            name=self.name,
            model_types=(self.model_type,),
            architectures=self.architectures,
            build_config=build_config,
            convert_tensors=convert_tensors if converts else unchanged,
            text_name=text_name,
        )


def _row(name: str, model_type: str, architecture: str, text_type: str, **more: Any) -> Multimodal:
    return Multimodal(
        name=name, model_type=model_type, architectures=(architecture,), text_type=text_type, **more
    )


_ROWS = (
    _row("Aria", "aria", "AriaForConditionalGeneration", "aria_text"),
    _row("Aya Vision", "aya_vision", "AyaVisionForConditionalGeneration", "cohere2"),
    _row("Command A Vision", "cohere2_vision", "Cohere2VisionForConditionalGeneration", "cohere2"),
    _row("DeepSeek-VL", "deepseek_vl", "DeepseekVLForConditionalGeneration", "llama"),
    _row("EXAONE 4.5", "exaone4_5", "Exaone4_5_ForConditionalGeneration", "exaone4"),
    _row("FastVLM", "fast_vlm", "FastVlmForConditionalGeneration", "qwen2"),
    _row("Gemma 3", "gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
    _row("Gemma 3n", "gemma3n", "Gemma3nForConditionalGeneration", "gemma3n_text"),
    _row("Gemma 4", "gemma4", "Gemma4ForConditionalGeneration", "gemma4_text"),
    _row("Gemma 4 (unified)", "gemma4_unified", "Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text"),
    _row("GOT-OCR2", "got_ocr2", "GotOcr2ForConditionalGeneration", "qwen2"),
    _row("HyperCLOVA X Vision", "hyperclovax_vision_v2", "HyperCLOVAXVisionV2ForConditionalGeneration", "hyperclovax"),
    _row("Idefics2", "idefics2", "Idefics2ForConditionalGeneration", "mistral"),
    _row("Idefics3", "idefics3", "Idefics3ForConditionalGeneration", "llama", images=True),
    _row("InternVL", "internvl", "InternVLForConditionalGeneration", "qwen2", images=True),
    _row("Janus", "janus", "JanusForConditionalGeneration", "llama"),
    _row("Kimi K2.5", "kimi_k25", "Kimi_K25ForConditionalGeneration", "deepseek_v3"),
    _row("LightOnOCR", "lighton_ocr", "LightOnOcrForConditionalGeneration", "qwen3"),
    _row("Llama 4", "llama4", "Llama4ForConditionalGeneration", "llama4_text"),
    _row("LLaVA", "llava", "LlavaForConditionalGeneration", "llama", images=True),
    _row("LLaVA-NeXT", "llava_next", "LlavaNextForConditionalGeneration", "llama", images=True),
    _row("LLaVA-NeXT-Video", "llava_next_video", "LlavaNextVideoForConditionalGeneration", "llama"),
    _row("LLaVA-OneVision", "llava_onevision", "LlavaOnevisionForConditionalGeneration", "qwen2", images=True),
    _row("Mistral Small 3.1, Pixtral", "mistral3", "Mistral3ForConditionalGeneration", "mistral", images=True),
    _row("Ovis2", "ovis2", "Ovis2ForConditionalGeneration", "qwen2"),
    _row("Perception LM", "perception_lm", "PerceptionLMForConditionalGeneration", "llama"),
    _row("Qianfan-OCR", "qianfan_ocr", "QianfanOCRForConditionalGeneration", "qwen3"),
    _row("Qwen2-VL", "qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_vl_text", is_flat=True, images=True),
    _row("Qwen2.5-VL", "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", is_flat=True,
         images=True),
    _row("Qwen3-VL", "qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text", images=True, interleaved=True),
    _row("Qwen3-VL MoE", "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text",
         convert_tensors=_with_experts_by_rows, images=True, interleaved=True),
    _row("Qwen3.5", "qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_5_text", images=True, interleaved=True),
    _row("Qwen3.5 MoE", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text",
         images=True, interleaved=True),
    _row("SmolVLM", "smolvlm", "SmolVLMForConditionalGeneration", "llama", images=True),
    _row("VideoLLaMA 3", "video_llama_3", "VideoLlama3ForConditionalGeneration", "qwen2"),
    _row("Video-LLaVA", "video_llava", "VideoLlavaForConditionalGeneration", "llama"),
    _row("ViP-LLaVA", "vipllava", "VipLlavaForConditionalGeneration", "llama"),
)  # fmt: skip
MULTIMODAL = {row.model_type: row for row in _ROWS}
