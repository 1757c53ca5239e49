"""Tiny random checkpoints that read pictures, pictures as their processors return them, and transformers' outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.media import MediaItem
from pagemill.engine.outputs import RequestOutput
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.families.multimodal_trial import tiny_multimodal
from tests.engine.models.generic.trial import randomise

PLACEHOLDER, BEGIN, END, TILE = 90, 91, 92, 93
NUM_OUTPUT_TOKENS = 14
_ENGINE: dict[str, Any] = {
    "num_threads": 1, "num_kv_blocks": 96, "block_size": 4, "skip_tokenizer_init": True,
}  # fmt: skip
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Picture:
    """An encoder's arguments for one picture, and the tokens that represent it."""

    inputs: Inputs
    tokens: list[int]
    name: str

    def item(self, offset: int) -> MediaItem:
        first = self.tokens.index(PLACEHOLDER)
        last = len(self.tokens) - self.tokens[::-1].index(PLACEHOLDER)
        digest = sha256(self.name.encode()).digest()
        return MediaItem(offset + first, last - first, digest, self.inputs)


@dataclass(frozen=True)
class Type:
    """A type of model."""

    vision: dict[str, Any]
    picture: Callable[[np.random.Generator, int], tuple[Inputs, list[int]]]
    """From random numbers and the picture's number to its arguments, and its tokens between BEGIN and END."""
    fields: dict[str, Any]
    text: dict[str, Any]


def _pixels(draw: np.random.Generator, *shape: int) -> Any:
    return draw.standard_normal(shape).astype(np.float32)


def _whole(size: int, num_tokens: int) -> Callable[[np.random.Generator, int], tuple[Inputs, list[int]]]:
    """Pictures of one size."""
    return lambda draw, _: ({"pixel_values": _pixels(draw, 1, 3, size, size)}, [PLACEHOLDER] * num_tokens)


def _tiled(draw: np.random.Generator, number: int) -> tuple[Inputs, list[int]]:
    """Idefics3: tiles with separate tokens between them."""
    tiles = 1 + number % 3
    inputs = {
        "pixel_values": _pixels(draw, 1, tiles, 3, 56, 56),
        "pixel_attention_mask": np.ones((1, tiles, 56, 56), dtype=np.int64),
    }
    return inputs, ([PLACEHOLDER] * 4 + [TILE]) * (tiles - 1) + [PLACEHOLDER] * 4


def _patches(patch: int) -> Callable[[np.random.Generator, int], tuple[Inputs, list[int]]]:
    """Qwen-VL: patches of pictures of any size."""

    def picture(draw: np.random.Generator, number: int) -> tuple[Inputs, list[int]]:
        height, width = ((4, 6), (8, 2), (2, 2))[number % 3]
        inputs = {
            "pixel_values": _pixels(draw, height * width, 3 * 2 * patch * patch),
            "image_grid_thw": np.array([[1, height, width]]),
        }
        return inputs, [PLACEHOLDER] * (height * width // 4)

    return picture


def _anyres(draw: np.random.Generator, number: int) -> tuple[Inputs, list[int]]:
    """LLaVA-NeXT: a small complete picture and tiles, whose padding and rows change the number of vectors."""
    inputs = {"pixel_values": _pixels(draw, 1, 3, 3, 28, 28), "image_sizes": np.array([[28, 56]])}
    return inputs, [PLACEHOLDER] * (4 + 2 * 4 + 2)


def _pixtral(draw: np.random.Generator, number: int) -> tuple[Inputs, list[int]]:
    height, width = ((56, 28), (28, 84), (56, 56))[number % 3]
    inputs = {"pixel_values": _pixels(draw, 1, 3, height, width), "image_sizes": np.array([[height, width]])}
    return inputs, [PLACEHOLDER] * (height * width // 28**2)


_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
_PINS = {"image_grid_pinpoints": [[28, 56], [56, 28]]}
TYPES = {
    "llava": Type({}, _whole(28, 4), {}, {}),
    "idefics3": Type({"image_size": 56, "patch_size": 14}, _tiled, {}, {}),
    "smolvlm": Type({"image_size": 56, "patch_size": 14}, _tiled, {}, {}),
    "qwen2_vl": Type({}, _patches(14), {}, _MROPE),
    "qwen2_5_vl": Type({"depth": 2}, _patches(14), {}, _MROPE),
    "qwen3_vl": Type({"depth": 3, "deepstack_visual_indexes": [0, 2]}, _patches(16), {}, _MROPE),
    "qwen3_vl_moe": Type({"depth": 3, "deepstack_visual_indexes": [1]}, _patches(16), {}, _MROPE),
    "qwen3_5": Type({}, _patches(16), {}, {}),
    "qwen3_5_moe": Type({}, _patches(16), {}, {}),
    "llava_next": Type({}, _anyres, _PINS, {}),
    "llava_onevision": Type({}, _anyres, _PINS, {}),
    "mistral3": Type({"image_size": 84}, _pixtral, {}, {}),
    "internvl": Type({"image_size": [28, 28]}, _whole(28, 1), {}, {}),
}


def write(model_type: str, directory: Path) -> Any:
    """Write a tiny checkpoint; returns the model that transformers loads from there."""
    kind = TYPES[model_type]
    fields = tiny_multimodal(model_type, 0, **kind.text)
    fields["vision_config"] |= kind.vision
    fields |= kind.fields
    name = "image_token_index" if "image_token_index" in fields else "image_token_id"
    fields |= {name: PLACEHOLDER, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    config = CONFIG_MAPPING[model_type].from_dict(fields)
    module_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    module = module_class._from_config(config, **options).eval()
    randomise(module, 1)
    module.save_pretrained(directory)
    content = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content))
    return module_class.from_pretrained(directory, **options).eval()


def picture(model_type: str, number: int) -> Picture:
    inputs, tokens = TYPES[model_type].picture(np.random.default_rng(number), number)
    return Picture(inputs, [BEGIN, *tokens, END], f"{model_type} {number}")


def prompt_of(parts: Sequence[Picture | list[int]]) -> tuple[list[int], list[MediaItem]]:
    token_ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, Picture):
            items.append(part.item(len(token_ids)))
            token_ids += part.tokens
        else:
            token_ids += part
    return token_ids, items


def expected(module: Any, parts: Sequence[Picture | list[int]]) -> tuple[list[int], list[float]]:
    """Return transformers' greedy tokens and their log probabilities."""
    token_ids, items = prompt_of(parts)
    given = {
        name: torch.from_numpy(_joined([item.inputs[name] for item in items], items))
        for name in (items[0].inputs if items else ())
    }
    ids = torch.tensor([token_ids])
    if "image_grid_thw" in given:
        given["mm_token_type_ids"] = (ids == PLACEHOLDER).long()
    output = module.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **given, max_new_tokens=NUM_OUTPUT_TOKENS, do_sample=False,
        return_dict_in_generate=True, output_logits=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    tokens = output.sequences[0, len(token_ids) :].tolist()
    logprobs = [
        step[0].float().log_softmax(-1)[token].item()
        for step, token in zip(output.logits, tokens, strict=True)
    ]
    return tokens, logprobs


def _joined(arrays: list[Any], items: list[MediaItem]) -> Any:
    """Join pictures' arrays as processors do: Idefics3's tiles in the second dimension, pixels padded."""
    if "pixel_attention_mask" in items[0].inputs:
        return np.concatenate(arrays, axis=1)
    sizes = [max(array.shape[axis] for array in arrays) for axis in range(2, arrays[0].ndim)]
    padded = [
        np.pad(
            array,
            [(0, 0), (0, 0), *((0, size - own) for size, own in zip(sizes, array.shape[2:], strict=True))],
        )
        for array in arrays
    ]
    return np.concatenate(padded)


def make_engine(directory: Path, **options: Any) -> Engine:
    return Engine.from_config(EngineConfig(model=str(directory), **(_ENGINE | options)))


def add(engine: Engine, name: str, parts: Sequence[Picture | list[int]], **params: Any) -> None:
    token_ids, items = prompt_of(parts)
    given = {"temperature": 0.0, "max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True, "logprobs": 0} | params
    engine.add_request(name, token_ids, SamplingParams(**given), media=items)


def run(engine: Engine) -> dict[str, tuple[list[int], list[float]]]:
    """Return each request's tokens and log probabilities."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            take(found, output)
        engine.check_integrity()
    return found


def take(found: dict[str, tuple[list[int], list[float]]], output: RequestOutput) -> None:
    assert output.error is None, output.error
    for delta in output.deltas:
        tokens, logprobs = found.setdefault(output.request_id, ([], []))
        tokens += delta.token_ids
        logprobs += [entry.logprob for entry in delta.logprobs or () if entry.logprob is not None]
