"""The text of multimodal checkpoints equals that of transformers' complete model; other tensors are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.llm import LLM
from pagemill.engine.models.checkpoint import read_tensors, weight_files
from pagemill.engine.models.families.multimodal import MULTIMODAL, text_name
from pagemill.engine.text.tokenizer import generation_eos_token_ids
from tests.engine.models.families.multimodal_trial import edit_config, rename, write_multimodal
from tests.engine.models.generic.sweep import multimodal_outcomes
from tests.engine.models.generic.trial import check_served, run

EXACT = [kind for kind, refusal in multimodal_outcomes().items() if refusal is None]
QUICK = ("llava", "qwen2_vl")
STEPS: dict[str, Any] = {"num_threads": 1, "num_kv_blocks": 64, "block_size": 4, "max_num_batched_tokens": 5}


@pytest.mark.parametrize("variant", [0, 1])
@pytest.mark.parametrize(
    "model_type", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in EXACT]
)
def test_output_equals_the_whole_model(model_type: str, variant: int, tmp_path: Path) -> None:
    module, expected = write_multimodal(model_type, variant, tmp_path)
    check_served(tmp_path, module, expected)


def test_every_row_is_exact() -> None:
    """The text type of each row is exact in outcomes.json, so none of them is omitted above."""
    assert list(MULTIMODAL) == EXACT


@pytest.mark.parametrize("body", ["language_model.model.", "model.language_model.", "language_model."])
def test_published_layouts_name_the_same_tensors(body: str) -> None:
    head = "language_model.lm_head.weight" if body.startswith("language_model.") else "lm_head.weight"
    assert text_name(f"{body}layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert text_name(f"{body}embed_tokens.weight") == "model.embed_tokens.weight"
    assert text_name(head) == "lm_head.weight"


def test_names_of_images_and_audio_are_left_out() -> None:
    for name in (
        "visual.blocks.0.attn.qkv.weight",
        "model.visual.merger.mlp.0.bias",
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "model.vision_tower.patch_embed.weight",
        "multi_modal_projector.linear_1.weight",
        "model.audio_tower.layers.0.weight",
        "model.embed_vision.embedding.weight",
        "model.connector.modality_projection.weight",
        "model.image_newline",
        "image_newline",
    ):
        assert text_name(name) is None, name


@pytest.mark.parametrize("layout", ["model.language_model.", "model."])
def test_other_layouts_compute_the_same(layout: str, tmp_path: Path) -> None:
    _, expected = write_multimodal("llava", 0, tmp_path)
    assert rename(tmp_path, "language_model.model.", layout)
    assert rename(tmp_path, "language_model.lm_head.", "lm_head.")
    assert run(LLM(str(tmp_path), **STEPS)) == expected


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_first_qwen_vl_has_its_text_beside_its_vision(model_type: str, tmp_path: Path) -> None:
    """Flat, with the type of rotation as published: a text's three positions are one value."""
    _, expected = write_multimodal(model_type, 0, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    text = content.pop("text_config")
    rope = text.pop("rope_parameters")
    for name in ("model_type", "architectures", "layer_types"):
        text.pop(name, None)
    content |= text | {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert run(LLM(str(tmp_path), **STEPS)) == expected


def test_tensors_of_images_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_multimodal("llava", 0, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any("vision" in name for name in stored)
    tensors = read_tensors(weight_files(tmp_path), text_name)
    assert tensors.keys() == {
        name.removeprefix("language_model.") for name in stored if name.startswith("language_model.")
    }
    # Unread parts may be of a type that no text has.
    save_file(
        stored | {"vision_tower.codes": torch.zeros(3, dtype=torch.int8)}, tmp_path / "model.safetensors"
    )
    LLM(str(tmp_path), **STEPS)


@pytest.mark.slow
def test_broken_checkpoints_name_the_field_or_the_tensor(tmp_path: Path) -> None:
    write_multimodal("qwen3_vl", 0, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for text, message in (
        (None, "config.json of model type 'qwen3_vl' lacks text_config"),
        ("none", "text_config of model type 'qwen3_vl' is not a JSON object"),
        (content["text_config"] | {"hidden_size": "wide"}, "hidden_size"),
        (content["text_config"] | {"hidden_size": 32}, "weight has shape"),
        (content["text_config"] | {"num_hidden_layers": 3}, "model.layers.2.* first"),
    ):
        edit_config(tmp_path, text_config=text)
        with pytest.raises(ModelLoadError, match=message):
            LLM(str(tmp_path), **STEPS)
    edit_config(tmp_path, text_config=content["text_config"])
    assert rename(tmp_path, "model.language_model.", "model.visual.")
    assert rename(tmp_path, "lm_head.", "visual.")
    with pytest.raises(ModelLoadError, match=r"no tensor of .* belongs to a language model"):
        LLM(str(tmp_path), **STEPS)


def test_the_end_token_may_be_the_texts(tmp_path: Path) -> None:
    edit = {"model_type": "llava", "text_config": {"eos_token_id": [7, 9]}}
    (tmp_path / "config.json").write_text(json.dumps(edit))
    assert generation_eos_token_ids(tmp_path) == [7, 9]
