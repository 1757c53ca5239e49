"""Tiny random checkpoints that read pictures, with a real tokenizer, chat template and processor."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from pagemill.engine.images.child import load_processor
from tests.engine.images.model_folders import TYPES, write_folder
from tests.engine.media.tiny_vision import TYPES as VISION_TYPES
from tests.engine.models.families.multimodal_trial import tiny_multimodal
from tests.engine.models.generic.trial import randomise

_TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}


def write_checkpoint(model_type: str, directory: Path) -> Any:
    """Write a checkpoint; returns the model that transformers loads from there."""
    write_folder(model_type, directory)
    if model_type in ("smolvlm", "idefics3"):  # tiles of the vision tower's size
        file = directory / "preprocessor_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | _TILES))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    kind, tokens = VISION_TYPES[model_type], TYPES[model_type][3]
    text = kind.text | {"vocab_size": len(tokenizer), "max_position_embeddings": 2048}
    fields = tiny_multimodal(model_type, 0, **text)
    fields["vision_config"] |= kind.vision
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    name = "image_token_index" if "image_token_index" in fields else "image_token_id"
    fields |= kind.fields | {name: ids["image_token"]}
    fields |= {f"{name}_id": number for name, number in ids.items() if name.startswith("vision_")}
    config = CONFIG_MAPPING[model_type].from_dict(fields)
    module_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    module = module_class._from_config(config, **options).eval()
    randomise(module, 1)
    module.save_pretrained(directory)
    return module_class.from_pretrained(directory, **options).eval()


def whole_call(directory: Path, chat: list[dict[str, Any]]) -> Any:
    """Return the result of one call of transformers' processor for a chat with images as bytes."""
    processor, _ = load_processor(directory)
    pictures = [
        Image.open(io.BytesIO(part["image"])).convert("RGB")
        for message in chat
        for part in message["content"]
        if part["type"] == "image"
    ]
    text = processor.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    has_bos = text.startswith(processor.tokenizer.bos_token)
    images = {"images": [pictures]} if pictures else {}
    return processor(text=[text], add_special_tokens=not has_bos, **images)


def generated(module: Any, directory: Path, chat: list[dict[str, Any]], max_tokens: int) -> list[int]:
    """Return transformers' greedy tokens after a chat."""
    inputs = whole_call(directory, chat).convert_to_tensors("pt")
    output = module.generate(
        **inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens
