"""Quantized checkpoints of types that no family names, also with latent attention: weights are dequantized first."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.llm import LLM
from tests.engine.models.generic.test_latents import CASES, OPTIONS, outputs
from tests.engine.models.generic.tiny_configs import tiny_config
from tests.engine.models.generic.trial import build, write_checkpoint
from tests.engine.models.quantized.checkpoints import Format, float8_blocks, int8, quantize

pytestmark = pytest.mark.slow

FP8, INT8 = float8_blocks(32, 32), int8()


def write_pair(directory: Path, model_type: str, fields: dict[str, Any], form: Format) -> tuple[Path, Path]:
    """Write a tiny model with all projections in this format, also those of experts, and its plain counterpart."""
    plain, stored = directory / "plain", directory / "stored"
    plain.mkdir()
    write_checkpoint(build(model_type, tiny_config(model_type, 0) | fields), plain)
    quantize(plain, stored, form)
    return stored, plain


@pytest.mark.parametrize(
    ("model_type", "fields", "form", "options"),
    [
        pytest.param(*CASES["V3"], FP8, {}, id="V3-fp8"),
        pytest.param(*CASES["V3"], FP8, {"quantization": "int8"}, id="V3-fp8-int8"),
        pytest.param(*CASES["V3"], INT8, {}, id="V3-w8a8"),
        pytest.param(*CASES["V2 Lite"], FP8, {}, id="V2-fp8"),
        pytest.param("olmo2", {}, FP8, {}, id="olmo2-fp8"),
    ],
)
def test_as_the_plain_numbers(
    model_type: str,
    fields: dict[str, Any],
    form: Format,
    options: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Startup also compares them with transformers' own logits."""
    stored, plain = write_pair(tmp_path, model_type, fields, form)
    settings = OPTIONS | options
    with caplog.at_level(logging.INFO, logger="pagemill.engine"):
        llm = LLM(str(stored), **settings)
    assert "the weights are widened" in caplog.text
    assert ("latents in place of keys and values" in caplog.text) == model_type.startswith("deepseek")
    assert outputs(llm) == outputs(LLM(str(plain), **settings))


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, *CASES["V3"], FP8)
    tensors = load_file(stored / "model.safetensors")
    lost = "model.layers.1.mlp.experts.2.up_proj"
    save_file({n: t for n, t in tensors.items() if not n.startswith(lost)}, stored / "model.safetensors")
    with pytest.raises(ModelLoadError):
        LLM(str(stored), **OPTIONS)
    damaged = tensors | {f"{lost}.weight_scale_inv": torch.full((1, 1), torch.nan)}
    save_file(damaged, stored / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{lost}.weight_scale_inv"):
        LLM(str(stored), **OPTIONS)
