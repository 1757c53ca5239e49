"""Tiny checkpoints as the publishers of each format write them, and the weights that they represent.

Packing is written out value by value, from the formats' documentation, and shares no code with the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny_model import save_tiny_llama

Tensors = dict[str, torch.Tensor]
Words = list[list[int]]


@dataclass
class Stored:
    """A linear layer's tensors by part, and the weight that they represent, fp32 [out, in]."""

    parts: Tensors
    weight: torch.Tensor


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    """The quantization_config."""
    store: Callable[[torch.Tensor], Stored]
    """Quantizes a weight [out, in]."""


def write_pair(directory: Path, form: Format) -> tuple[Path, Path]:
    """Write a tiny LLaMA in this format, except its head as publishers do, and its counterpart of plain fp32 values."""
    plain, stored = directory / "plain", directory / "stored"
    save_tiny_llama(plain, hidden_size=128, intermediate_size=256, std=0.15)
    quantize(plain, stored, form)
    return stored, plain


def quantize(plain: Path, stored: Path, form: Format) -> None:
    """Write a copy of a checkpoint with projections in this format, and the represented values into the original."""
    tensors, out = load_file(plain / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if "_proj" in name and name.endswith(".weight") and tensor.ndim == 2:
            made = form.store(tensor)
            tensors[name] = made.weight.contiguous()
            module = name.removesuffix("weight")
            out |= {module + part: value.contiguous() for part, value in made.parts.items()}
        else:
            out[name] = tensor
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    stored.mkdir()
    for file in plain.glob("*.json"):
        (stored / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": form.config}))
    save_file(out, stored / "model.safetensors", {"format": "pt"})


def pack_words(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack [rows, n] along the columns, int32 [rows, ceil(n * bits / 32)]; `order`: the column at each position."""
    each = 32 // bits
    rows = []
    for row in numbers.tolist():
        words = []
        for first in range(0, len(row), each):
            places = [row[first + i] if first + i < len(row) else 0 for i in order or range(each)]
            word = sum(int(number) << (bits * place) for place, number in enumerate(places))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def round_to_grid(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, *, is_symmetric: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values from 0, scales, zero points [out, num_groups], and (value - zero) * scale in fp32."""
    most = 2**bits - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        if is_symmetric:
            scale = (part.abs().amax(1) / (most / 2)).to(dtype).float()
            zero = torch.full_like(scale, 2 ** (bits - 1))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / most).to(dtype).float()
            zero = (-low / scale).round().clamp(0, most)
        scales.append(scale)
        zeros.append(zero)
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    numbers = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, most)
    exact = (numbers - zero[:, groups]).double() * scale[:, groups].double()
    return numbers.long(), scale.to(dtype), zero.long(), exact.float()


def in_sequence(in_features: int, group_size: int) -> torch.Tensor:
    return torch.arange(in_features) // (in_features if group_size == -1 else group_size)


def gptq(bits: int = 4, group_size: int = 32, *, sym: bool = True, desc_act: bool = False, version: int = 1,
         bias: bool = False) -> Format:  # fmt: skip
    """AutoGPTQ's files; with `bias` the zeros that it writes for layers without a bias."""

    def store(weight: torch.Tensor) -> Stored:
        out_features, in_features = weight.shape
        g_idx = in_sequence(in_features, group_size)
        if desc_act:  # the same for all layers with the same inputs, like the order of activations
            g_idx = g_idx[torch.randperm(in_features, generator=torch.Generator().manual_seed(in_features))]
        numbers, scales, zeros, exact = round_to_grid(
            weight, bits, g_idx, is_symmetric=sym, dtype=torch.float16
        )
        if version == 1:
            zeros = zeros.clamp(min=1)  # it cannot store 0
            exact = ((numbers - zeros[:, g_idx]).double() * scales.double()[:, g_idx]).float()
        parts = {
            "qweight": pack_words(numbers, bits).t(),
            "qzeros": pack_words((zeros - int(version == 1)).t(), bits),
            "scales": scales.t(),
            "g_idx": g_idx.int(),
        }
        if bias:
            parts["bias"] = torch.zeros(out_features, dtype=torch.float16)
        return Stored(parts, exact)

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "damp_percent": 0.01,
        "desc_act": desc_act, "sym": sym, "true_sequential": True, "model_name_or_path": None,
        "model_file_base_name": "model",
    }  # fmt: skip
    if version == 2:
        config["checkpoint_format"] = "gptq_v2"
    return Format(config, store)


def awq(group_size: int = 32) -> Format:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def store(weight: torch.Tensor) -> Stored:
        groups = in_sequence(weight.shape[1], group_size)
        numbers, scales, zeros, exact = round_to_grid(
            weight, 4, groups, is_symmetric=False, dtype=torch.float16
        )
        parts = {
            "qweight": pack_words(numbers.t(), 4, order),
            "qzeros": pack_words(zeros.t(), 4, order),
            "scales": scales.t(),
        }
        return Stored(parts, exact)

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
              "modules_to_not_convert": None}  # fmt: skip
    return Format(config, store)


def _compressed(
    layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    args = {"actorder": None, "dynamic": False, "block_structure": None, "group_size": None, "observer": "minmax",
            "observer_kwargs": {}, "symmetric": True, "type": "int"} | weights  # fmt: skip
    group = {
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": args,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "quantization_status": "compressed",
    }


def packed(bits: int = 4, group_size: int = 32, *, sym: bool = True, actorder: bool = False) -> Format:
    """W4A16 and W8A16 of compressed-tensors. `group_size` -1: a scale per output."""

    def store(weight: torch.Tensor) -> Stored:
        out_features, in_features = weight.shape
        groups = in_sequence(in_features, group_size)
        if actorder:
            groups = groups[torch.randperm(in_features, generator=torch.Generator().manual_seed(in_features))]
        numbers, scales, zeros, exact = round_to_grid(
            weight, bits, groups, is_symmetric=sym, dtype=torch.bfloat16
        )
        parts = {
            "weight_packed": pack_words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([out_features, in_features]),
        }
        if not sym:
            parts["weight_zero_point"] = pack_words(zeros.t(), bits).t()
        if actorder:
            parts["weight_g_idx"] = groups.int()
        return Stored(parts, exact)

    strategy = "channel" if group_size == -1 else "group"
    weights = {"num_bits": bits, "strategy": strategy, "symmetric": sym}
    if group_size != -1:
        weights["group_size"] = group_size
    if actorder:
        weights["actorder"] = "group"
    return Format(_compressed("pack-quantized", weights), store)


def int8(*, sym: bool = True) -> Format:
    """W8A8 of compressed-tensors: a scale per output, and a dynamic scale per token."""

    def store(weight: torch.Tensor) -> Stored:
        groups = in_sequence(weight.shape[1], -1)
        numbers, scales, zeros, exact = round_to_grid(
            weight, 8, groups, is_symmetric=sym, dtype=torch.bfloat16
        )
        parts = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}
        if not sym:
            parts["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return Stored(parts, exact)

    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "strategy": "channel", "symmetric": sym}
    return Format(_compressed("int-quantized", weights, activations), store)


def _float8(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values of weight / scales, and the weights that they represent."""
    codes = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, (codes.double() * scales.double()).float()


def float8_compressed(strategy: str = "channel") -> Format:
    def store(weight: torch.Tensor) -> Stored:
        peaks = weight.abs().amax() if strategy == "tensor" else weight.abs().amax(1, keepdim=True)
        scales = (peaks / 448).to(torch.bfloat16)
        codes, exact = _float8(weight, scales.float())
        parts = {
            "weight": codes,
            "weight_scale": scales.reshape(-1, 1) if strategy == "channel" else scales.view(1),
        }
        if strategy == "tensor":
            parts["input_scale"] = torch.ones(1, dtype=torch.bfloat16)
        return Stored(parts, exact)

    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    weights = {"num_bits": 8, "strategy": strategy, "type": "float"}
    return Format(_compressed("float-quantized", weights, activations), store)


def float8_blocks(rows: int = 128, columns: int = 128) -> Format:
    """DeepSeek V3's and Qwen3's FP8."""

    def store(weight: torch.Tensor) -> Stored:
        out_features, in_features = weight.shape
        scales = torch.empty(-(-out_features // rows), -(-in_features // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = block.abs().max() / 448
        each = scales[torch.arange(out_features) // rows][:, torch.arange(in_features) // columns]
        codes, exact = _float8(weight, each)
        return Stored({"weight": codes, "weight_scale_inv": scales}, exact)

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [rows, columns],
    }
    return Format(config, store)


_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _float4(weight: torch.Tensor, scales: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e2m1 pairs of weight / scales, and the weights that they represent."""
    each = scales.repeat_interleave(group, 1)
    scaled = weight / each
    codes = (scaled.abs()[..., None] - _FLOAT4).abs().argmin(-1)
    exact = _FLOAT4[codes] * scaled.sign() * each
    codes = codes + 8 * (scaled < 0)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), exact


def mxfp4(layout: str = "compressed") -> Format:
    def store(weight: torch.Tensor) -> Stored:
        out_features, in_features = weight.shape
        peaks = weight.view(out_features, -1, 32).abs().amax(2)
        exponents = torch.floor(torch.log2(peaks)) - 2
        pairs, exact = _float4(weight, torch.exp2(exponents), 32)
        scales = (exponents + 127).to(torch.uint8)
        if layout == "compressed":
            return Stored({"weight_packed": pairs, "weight_scale": scales}, exact)
        blocks = pairs.view(out_features, in_features // 32, 16)
        return Stored({"weight_blocks": blocks, "weight_scales": scales}, exact)

    if layout != "compressed":
        return Format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, store)
    weights = {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8",
    }  # fmt: skip
    return Format(_compressed("mxfp4-pack-quantized", weights), store)


def nvfp4() -> Format:
    def store(weight: torch.Tensor) -> Stored:
        out_features = len(weight)
        whole = 6 * 448 / weight.abs().max()
        peaks = weight.view(out_features, -1, 16).abs().amax(2)
        scales = (peaks / 6 * whole).to(torch.float8_e4m3fn)
        pairs, exact = _float4(weight, scales.float() / whole, 16)
        return Stored(
            {"weight_packed": pairs, "weight_scale": scales, "weight_global_scale": whole.view(1)}, exact
        )

    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return Format(_compressed("nvfp4-pack-quantized", weights), store)


FORMATS: dict[str, tuple[Format, str]] = {
    "gptq": (gptq(), "4-bit integers, lossless"),
    "gptq-zeros": (gptq(sym=False, bias=True), "4-bit integers, lossless"),
    "gptq-v2": (gptq(sym=False, version=2, group_size=128), "4-bit integers, lossless"),
    "gptq-rows": (gptq(group_size=-1), "4-bit integers, lossless"),
    "gptq-8": (gptq(8), "8-bit integers, lossless"),
    "gptq-8-zeros": (gptq(8, sym=False), "widened to float32"),
    "gptq-2": (gptq(2), "4-bit integers, lossless"),
    "gptq-act-order": (gptq(desc_act=True), "4-bit integers, lossless, inputs reordered"),
    "awq": (awq(), "4-bit integers, lossless"),
    "awq-64": (awq(64), "4-bit integers, lossless"),
    "w4a16": (packed(), "4-bit integers, lossless"),
    "w4a16-zeros": (packed(group_size=128, sym=False), "4-bit integers, lossless"),
    "w4a16-rows": (packed(group_size=-1), "4-bit integers, lossless"),
    "w4a16-act-order": (packed(actorder=True), "4-bit integers, lossless, inputs reordered"),
    "w8a16": (packed(8), "8-bit integers, lossless"),
    "w8a8": (int8(), "8-bit integers, lossless"),
    "w8a8-zeros": (int8(sym=False), "widened to float32"),
    "fp8-rows": (float8_compressed(), "8-bit floats, lossless"),
    "fp8-tensor": (float8_compressed("tensor"), "8-bit floats, lossless"),
    "fp8-blocks": (float8_blocks(), "8-bit floats, lossless"),
    "fp8-uneven-blocks": (float8_blocks(48, 96), "8-bit floats, lossless"),
    "mxfp4": (mxfp4(), "8-bit integers, lossless"),
    "mxfp4-blocks": (mxfp4("gpt-oss"), "8-bit integers, lossless"),
    "nvfp4": (nvfp4(), "widened to float32"),
}
"""Each with the form in which a CPU keeps its weights."""
