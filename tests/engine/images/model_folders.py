"""Folders of models that read pictures, without weights: tokenizer, chat template and a processor's settings."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import AutoTokenizer

from pagemill.engine.models.packaged import packaged_model_directory

_SMALL = {"height": 28, "width": 28}
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_QWEN = {
    "image_token": "<|image_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_GEMMA = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
_INTERNVL = {
    "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>", "end_image_token": "</img>",
    "video_token": "<video>",
}  # fmt: skip
_IDEFICS = {
    "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
}  # fmt: skip
_SMALL_TILES = {
    "do_image_splitting": True,
    "size": {"longest_edge": 112},
    "max_image_size": {"longest_edge": 28},
}
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
_Row = tuple[str, dict[str, Any], dict[str, Any], dict[str, str], str]
TYPES: dict[str, _Row] = {
    "llava": (
        "LlavaImageProcessor", {"size": {"shortest_edge": 28}, "crop_size": _SMALL},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_token": "<image>"}, "<image>\n",
    ),
    "llava_next": (
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 28}, "crop_size": _SMALL, "image_grid_pinpoints": _PINPOINTS},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_token": "<image>"}, "<image>\n",
    ),
    "llava_onevision": (
        "LlavaOnevisionImageProcessor", {"size": _SMALL, "image_grid_pinpoints": _PINPOINTS},
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        {"image_token": "<image>", "video_token": "<video>"}, "<image>\n",
    ),
    "smolvlm": (
        "SmolVLMImageProcessor", _SMALL_TILES, {"image_seq_len": 4},
        _IDEFICS, _SMOLVLM,
    ),
    "idefics3": (
        "Idefics3ImageProcessor", _SMALL_TILES, {"image_seq_len": 4},
        _IDEFICS, _SMOLVLM,
    ),
    "qwen2_5_vl": (
        "Qwen2VLImageProcessor", {"size": {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}}, {}, _QWEN,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "qwen3_vl": (
        "Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 32 * 32}, "patch_size": 16}, {}, _QWEN,
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    "mistral3": (
        "PixtralImageProcessor", {"size": {"longest_edge": 84}, "patch_size": 14},
        {"patch_size": 14, "spatial_merge_size": 2},
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}, "[IMG]",
    ),
    "gemma3": (
        "Gemma3ImageProcessor", {"size": _SMALL}, {"image_seq_length": 4}, _GEMMA, "<start_of_image>",
    ),
    "internvl": (
        "GotOcr2ImageProcessor", {"size": _SMALL, "crop_to_patches": True, "max_patches": 4},
        {"image_seq_length": 4}, _INTERNVL, "<IMG_CONTEXT>\n",
    ),
}  # fmt: skip
"""Model type: class of the image processor, its settings, those of the processor, tokens, and the template's
text for a picture, or the complete template."""


def write_folder(model_type: str, directory: Path) -> Path:
    """Write the folder of a model type, and return it."""
    name, image_settings, settings, tokens, written = TYPES[model_type]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(packaged_model_directory())
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    special = [*tokens.values(), "<end_of_utterance>", *(tiles if "fake_image_token" in tokens else ())]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = _CHATML.replace("IMAGE", written) if "{%" not in written else written
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": tokens}))
    placeholder = tokens.get("image_token") or tokens["context_image_token"]
    config = {"model_type": model_type, "image_token_id": tokenizer.convert_tokens_to_ids(placeholder)}
    (directory / "config.json").write_text(json.dumps(config))
    image = {"image_processor_type": name} | image_settings
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    (directory / "processor_config.json").write_text(json.dumps(settings))
    return directory


def noise(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return a picture of coarse random colors."""
    random_bytes = random.Random(seed).randbytes(8 * 8 * 3)
    return Image.frombytes("RGB", (8, 8), random_bytes).resize((width, height)).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """Return the bytes of a picture's file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()
