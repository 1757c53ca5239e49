"""Unsupported content of a quantized checkpoint stops startup, with one line that states it and the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.llm import LLM
from pagemill.engine.models.quantized.reader import join_parts, widened
from pagemill.engine.models.quantized.registry import find_scheme
from tests.engine.models.quantized.checkpoints import (
    Format,
    Tensors,
    awq,
    float8_blocks,
    float8_compressed,
    gptq,
    int8,
    mxfp4,
    packed,
    write_pair,
)

UP = "model.layers.1.mlp.up_proj."
Change = Callable[[Tensors], object]


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as raised:
        LLM(str(directory), skip_tokenizer_init=True, num_kv_blocks=8, num_threads=1)
    message = str(raised.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


def with_settings(directory: Path, settings: Any) -> Path:
    stored, _ = write_pair(directory, gptq())
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return stored


@pytest.mark.parametrize(
    "method",
    ["bitsandbytes", "hqq", "quip", "aqlm", "eetq", "spqr", "vptq", "quark", "torchao", "auto-round", "exl2", None, 4],
)  # fmt: skip
def test_other_methods_are_named(method: Any) -> None:
    with pytest.raises(ModelLoadError) as raised:
        find_scheme({"quant_method": method, "bits": 4})
    message = str(raised.value)
    assert f"weights quantized by {method!r} are not supported (supported: awq, compressed-tensors" in message
    assert "give the original checkpoint, and set quantization=int8" in message


COMPRESSED = packed().config
GROUP = COMPRESSED["config_groups"]["group_0"]


def compressed_with(**weights: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | weights}}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("gptq", "it is 'gptq'"),
        ({"bits": 4}, "weights quantized by None"),
        (gptq().config | {"bits": 3}, "bits=3 of quantization_config is not supported (supported: 2, 4, 8)"),
        (gptq().config | {"bits": "4"}, "bits='4'"),
        (gptq().config | {"group_size": 0}, "group_size is 0"),
        (gptq().config | {"group_size": None}, "group_size is None"),
        (gptq().config | {"sym": "yes"}, "sym is 'yes'"),
        (gptq().config | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (gptq().config | {"is_marlin_format": True}, "is_marlin_format=True"),
        (gptq().config | {"dynamic": {"+:.*up": {"bits": 8}}}, "settings per layer"),
        (awq().config | {"bits": 8}, "bits=8"),
        (awq().config | {"version": "gemv"}, "version='gemv'"),
        (float8_blocks().config | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (float8_blocks().config | {"weight_block_size": [128]}, "weight_block_size is [128]"),
        (COMPRESSED | {"format": "marlin-24"}, "format='marlin-24'"),
        (COMPRESSED | {"config_groups": {}}, "config_groups has no weights"),
        (COMPRESSED | {"config_groups": [1]}, "config_groups is [1]"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (COMPRESSED | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        (compressed_with(num_bits=3), "num_bits=3"),
        (compressed_with(num_bits=None), "num_bits=None"),
        (compressed_with(strategy="attn_head"), "strategy='attn_head'"),
        (compressed_with(strategy="block"), "block_structure is None"),
        (compressed_with(group_size=-5), "group_size is -5"),
        (compressed_with(symmetric=1), "symmetric is 1"),
    ],
)  # fmt: skip
def test_settings(settings: Any, message: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        find_scheme(settings)
    assert message in str(raised.value)


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def apply(tensors: Tensors) -> None:
        tensors[UP + name] = change(tensors[UP + name])

    return apply


def _drop(name: str) -> Change:
    return lambda tensors: tensors.pop(UP + name)


def _with_nan(codes: torch.Tensor) -> torch.Tensor:
    codes.view(torch.uint8)[3, 3] = 0xFF
    return codes


def _minus_one(g_idx: torch.Tensor) -> torch.Tensor:
    return g_idx - 1


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (gptq(), _drop("qweight"), f"{UP[:-1]} has g_idx, qzeros, scales, and no qweight"),
        (gptq(), _drop("scales"), f"{UP}scales is missing"),
        (gptq(), _drop("qzeros"), f"{UP}qzeros is missing"),
        (gptq(), _set("qweight", torch.Tensor.long), f"{UP}qweight is int64, expected int32"),
        (gptq(), _set("qweight", lambda t: t[:8]), "scales has shape [4, 256], quantization_config asks for [2, 256]"),
        (gptq(), _set("qweight", torch.Tensor.flatten), "qweight has shape"),
        (gptq(), _set("scales", lambda t: t[:2]), f"{UP}scales has shape [2, 256], quantization"),
        (gptq(), _set("scales", lambda t: t * float("nan")), f"{UP}scales is not finite"),
        (gptq(), _set("scales", torch.Tensor.int), f"{UP}scales is int32"),
        (gptq(), _set("qzeros", lambda t: t * 0), "zero points other than 8, although sym is true"),
        (gptq(), _set("g_idx", lambda t: t * 100), "g_idx names group 300, there are 4"),
        (gptq(), _set("g_idx", _minus_one), "there are 4: the file is damaged"),
        (gptq(), _set("g_idx", lambda t: t * 0), "groups of other sizes than 32"),
        (gptq(), _set("g_idx", lambda t: t[:5]), "g_idx has shape [5]"),
        (awq(), _drop("qzeros"), f"{UP}qzeros is missing"),
        (awq(), _set("qzeros", lambda t: t[:, :4]), "qzeros has shape [4, 4]"),
        (packed(), _drop("weight_scale"), f"{UP}weight_scale is missing"),
        (packed(), _drop("weight_shape"), f"{UP}weight_shape is missing"),
        (packed(), _set("weight_shape", lambda t: t * 2), "weight_shape has [512, 256]"),
        (packed(), _set("weight_shape", lambda t: -t), "weight_shape has [-256, -128]"),
        (packed(), _set("weight_scale", lambda t: t[:, :1]), "weight_scale has shape [256, 1]"),
        (packed(sym=False), _drop("weight_zero_point"), f"{UP}weight_zero_point is missing"),
        (int8(), _set("weight", torch.Tensor.float), f"{UP}weight is float32, expected int8"),
        (int8(), _drop("weight_scale"), f"{UP}weight_scale is missing"),
        (float8_compressed(), _drop("weight_scale"), f"{UP}weight_scale is missing"),
        (float8_blocks(), _drop("weight_scale_inv"), f"{UP}weight_scale_inv is missing"),
        (float8_blocks(), _set("weight_scale_inv", lambda t: t[:1]), "weight_scale_inv has shape [1, 1]"),
        (float8_blocks(), _set("weight", _with_nan), f"{UP}weight is not finite"),
        (float8_blocks(), _set("weight", torch.Tensor.half), f"{UP}weight is float16, expected float8_e4m3fn"),
        (mxfp4(), _set("weight_scale", lambda t: t * 0 + 255), "scales that are not finite"),
        (mxfp4("gpt-oss"), _set("weight_blocks", lambda t: t[None]), "has shape [256, 4], quantization_config asks"),
        (mxfp4("gpt-oss"), _drop("weight_scales"), f"{UP}weight.scales is missing"),
        (gptq(), _set("qweight", lambda t: t.repeat(1, 2)), "scales has shape [4, 256]"),
    ],
)  # fmt: skip
def test_tensors(form: Format, change: Change, message: str) -> None:
    tensors = {UP + part: tensor for part, tensor in form.store(torch.randn(256, 128)).parts.items()}
    change(tensors)
    scheme = find_scheme(form.config)
    assert scheme is not None
    with pytest.raises(ModelLoadError) as raised:
        widened(join_parts(tensors, scheme, torch.float32))
    assert message in str(raised.value)


@pytest.mark.slow
def test_a_start_says_it_in_one_line(tmp_path: Path) -> None:
    assert "weights quantized by 'hqq' are not supported" in refusal(
        with_settings(tmp_path / "method", {"quant_method": "hqq"})
    )
    stored = with_settings(tmp_path / "tensors", gptq().config | {"group_size": 64})
    assert "down_proj.scales has shape [8, 128], quantization_config asks for [4, 128]" in refusal(stored)


def test_a_weight_of_another_size_than_the_models(tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, gptq())
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"intermediate_size": 512}))
    assert "has shape [128, 256], config.json asks for [128, 512]" in refusal(stored)


def test_settings_without_such_weights(tmp_path: Path) -> None:
    _, plain = write_pair(tmp_path, gptq())
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"quantization_config": gptq().config}))
    assert "quantization_config names a format, and no tensor is in it" in refusal(plain)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_settings_in_a_file_of_their_own(name: str, tmp_path: Path) -> None:
    """The location in the first releases of AutoGPTQ and AutoAWQ."""
    form = gptq() if name.startswith("quantize") else awq()
    stored, _ = write_pair(tmp_path, form)
    config = json.loads((stored / "config.json").read_text())
    del config["quantization_config"]
    (stored / "config.json").write_text(json.dumps(config))
    settings = {key: value for key, value in form.config.items() if key != "quant_method"}
    if form.config["quant_method"] == "awq":
        settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (stored / name).write_text(json.dumps(settings))
    LLM(str(stored), skip_tokenizer_init=True, num_kv_blocks=8, num_threads=1)
