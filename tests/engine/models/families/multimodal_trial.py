"""Tries the text of a multimodal type: transformers' complete model is written, and the reference for texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from pagemill.engine.models.families.multimodal import MULTIMODAL
from tests.engine.models.families.tiny import PROMPTS
from tests.engine.models.generic.tiny_configs import Config, shrunk, tiny_config
from tests.engine.models.generic.trial import NoMargin, complete, randomise

_SEEDS = range(6)
_VISION: Config = {
    "depth": 1,
    "embed_dim": 32,
    "num_heads": 2,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "image_size": 28,
}
_MROPE: Config = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
_TEXTS: dict[str, Config] = {
    kind: {"rope_parameters": _MROPE}
    for kind in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
}
_TEXTS["qwen3_vl_moe_text"] |= {"moe_intermediate_size": 48}  # twice this is not the model's width
_TEXT_ONLY = ("aya_vision", "cohere2_vision", "fast_vlm", "gemma3n", "ovis2", "perception_lm")
"""The reference is the text model: transformers' multimodal class omits Cohere's `logit_scale`, or its vision
tower needs another library or size."""
_MISNAMED = {
    "kimi_k25": "language_model.model.blocks.",
    "qianfan_ocr": "language_model.model.encoder.layers.",
}
"""Names that transformers writes but no published checkpoint has: those of the vision tower's layers."""


def tiny_multimodal(model_type: str, variant: int, **text_fields: Any) -> Config:
    """Return config.json of a tiny model of a multimodal type.

    Args:
        text_fields: changes of its text_config; None removes a field.
    """
    default = CONFIG_MAPPING[model_type]()
    text = default.get_text_config(decoder=True)
    small: Config = {}
    for name, value in default.to_dict().items():
        if name == "text_config":
            kind = text.model_type
            small[name] = tiny_config(kind, variant) | _TEXTS.get(kind, {}) | {"model_type": kind}
        elif name.endswith("_config") and isinstance(value, dict):
            fields = shrunk(value)
            small[name] = fields | {name: size for name, size in _VISION.items() if name in fields}
        elif name not in ("dtype", "torch_dtype"):
            small[name] = value
    given = small["text_config"] | text_fields
    small["text_config"] = {name: value for name, value in given.items() if value is not None}
    if variant:
        small["tie_word_embeddings"] = small["text_config"]["tie_word_embeddings"] = not getattr(
            default, "tie_word_embeddings", False
        )
    return small


def write_multimodal(
    model_type: str, variant: int, directory: Path, **text_fields: Any
) -> tuple[Any, list[list[int]]]:
    """Write a tiny checkpoint of a multimodal type whose greedy outputs do not depend on rounding.

    Args:
        text_fields: see `tiny_multimodal`.

    Returns:
        The model that transformers loads from there, and its outputs.
    """
    config = CONFIG_MAPPING[model_type].from_dict(tiny_multimodal(model_type, variant, **text_fields))
    is_text = model_type in _TEXT_ONLY
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING if is_text else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    own = config.text_config if is_text else config
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    module = mapping[type(own)]._from_config(own, **options).eval()
    for seed in _SEEDS:
        randomise(module, seed)
        module.save_pretrained(directory)
        loaded = type(module).from_pretrained(directory, **options).eval()
        outputs = [complete(loaded, prompt) for prompt in PROMPTS]
        if None not in outputs and len({tuple(output or ()) for output in outputs}) > 1:
            if is_text:
                wrap(directory, model_type, config)
            if (misnamed := _MISNAMED.get(model_type)) is not None:
                assert rename(directory, misnamed, "language_model.model.layers.")
            return loaded, [output for output in outputs if output is not None]
    raise NoMargin


def wrap(directory: Path, model_type: str, config: Any) -> None:
    """Turn a text model's directory into that of a multimodal type."""
    config.architectures = list(MULTIMODAL[model_type].architectures)
    config.save_pretrained(directory)
    rename(directory, "model.", "model.language_model.")


def rename(directory: Path, old: str, new: str) -> int:
    """Change the prefix of tensors' names; returns how many had it."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    changed = {
        new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()
    }
    save_file(changed, file, metadata={"format": "pt"})
    return len(changed.keys() - tensors.keys())


def edit_config(directory: Path, **fields: Any) -> None:
    """Change fields of config.json; None: remove it."""
    file = directory / "config.json"
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
