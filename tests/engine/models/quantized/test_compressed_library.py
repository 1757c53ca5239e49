"""Checkpoints of the compressed-tensors library, compared with the library's own reader. Includes NVFP4 and MXFP4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)

from pagemill.engine.models.quantized.reader import join_parts, widened
from pagemill.engine.models.quantized.registry import find_scheme

OUT, IN = 40, 192
INTEGERS = {"num_bits": 4, "type": "int"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "w4a16": ("pack-quantized", INTEGERS | {"strategy": "group", "group_size": 64}),
    "w4a16-zeros": ("pack-quantized", INTEGERS | {"strategy": "group", "group_size": 32, "symmetric": False}),
    "w4a16-rows": ("pack-quantized", INTEGERS | {"strategy": "channel", "symmetric": False}),
    "w8a16": ("pack-quantized", INTEGERS | {"num_bits": 8, "strategy": "channel"}),
    "w8a8": ("int-quantized", INTEGERS | {"num_bits": 8, "strategy": "channel"}),
    "w8a8-zeros": ("int-quantized", INTEGERS | {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "w8a8-tensor": ("int-quantized", INTEGERS | {"num_bits": 8, "strategy": "tensor"}),
    "naive": ("naive-quantized", INTEGERS | {"num_bits": 8, "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 64]},
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
}  # fmt: skip


def scales_for(layout: str, args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return scales and zero points with the shapes that the library calibrates."""
    size = args.get("group_size") or IN
    shapes = {"tensor": (1,), "block": (-(-OUT // 16), IN // 64)}
    shape = shapes.get(args["strategy"], (OUT, IN // size))
    scales = 0.02 + 0.05 * torch.rand(shape)
    if layout == "mxfp4-pack-quantized":
        scales = torch.exp2(torch.randint(-6, -1, shape).float())
    found = {"weight_scale": scales}
    if layout == "nvfp4-pack-quantized":
        found = {
            "weight_scale": (100 * scales).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": torch.tensor([77.0]),
        }
    if args.get("symmetric") is False:
        found["weight_zero_point"] = torch.randint(-3, 4, shape, dtype=torch.int8)
    return found


@pytest.mark.parametrize("name", CASES)
def test_read_as_the_library_reads_it(name: str) -> None:
    torch.manual_seed(4)
    layout, args = CASES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    library: Any = BaseCompressor.get_value_from_registry(layout)
    stored = library.compress({"weight": 0.2 * torch.randn(OUT, IN), **scales_for(layout, args)}, scheme)
    expected = library.decompress(stored, scheme)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=layout,
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    read = find_scheme(config.model_dump(mode="json"))
    assert read is not None
    tensors = {f"m.{part}": tensor.detach() for part, tensor in stored.items()}
    found = widened(join_parts(tensors, read, torch.float32))["m.weight"]
    assert found.shape == (OUT, IN)
    # The library dequantizes NVFP4 to bf16.
    torch.testing.assert_close(found, expected.float(), rtol=2**-8 if name == "nvfp4" else 1e-6, atol=0)
