"""The compiler's output for matmuls of rows sorted by expert, for GPUs that are not present."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.kernels.gpu.expert_matmul import expert_matmul_kernel
from pagemill.kernels.gpu.tile_order import TILE_GROUP
from pagemill.kernels.gpu.tuning import EXPERT_MATMUL_INPUTS, EXPERT_MATMUL_TILES, Tile
from tests.kernels.aot.compiler import compile_kernel
from tests.kernels.aot.specializations import typed


def arguments(element: str, bias: bool, num_experts: int, whole: bool, tile: Tile) -> dict[str, Any]:
    return {
        **typed(f"*{element}", "out_ptr x_ptr weight_ptr"),
        **typed(f"*{element}" if bias else None, "bias_ptr"),
        **typed("*i64", "offsets_ptr"),
        **typed("i32", "row_tiles out_features in_features stride_x_row"),
        "NUM_EXPERTS": num_experts,
        "NUM_EXPERTS_PADDED": num_experts,
        "WHOLE": whole,
        "GROUP": TILE_GROUP,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": EXPERT_MATMUL_INPUTS,
    }


def _cases() -> list[Any]:
    cases = []
    for capability in (80, 86, 89, 90, 100, 120):
        for _, size, tile in EXPERT_MATMUL_TILES:
            for bias, num_experts, whole in ((False, 128, True), (True, 32, False), (True, 512, True)):
                for element in ("fp32",) if size == 4 else ("bf16", "fp16"):
                    runs_always = capability in (80, 90) and (num_experts, element) == (128, "bf16")
                    name = f"sm_{capability}-{element}-{tile.block_m}-{num_experts}"
                    cases.append(
                        pytest.param(
                            element, bias, num_experts, whole, tile, capability,
                            id=name, marks=() if runs_always else pytest.mark.slow,
                        )
                    )  # fmt: skip
    return cases


@pytest.mark.parametrize(("element", "bias", "num_experts", "whole", "tile", "capability"), _cases())
def test_matmul(element: str, bias: bool, num_experts: int, whole: bool, tile: Tile, capability: int) -> None:
    kernel_arguments = arguments(element, bias, num_experts, whole, tile)
    compiled = compile_kernel(expert_matmul_kernel, kernel_arguments, capability, tile)
    assert compiled.wide_loads > 0
    if element == "fp32":
        assert compiled.mma == compiled.wgmma == 0, "exact products, which no tensor core makes"
    elif capability == 90 and tile.block_m >= 64:
        assert compiled.wgmma > 0, "rows in plenty must reach Hopper's tensor cores"
    elif capability != 100:  # its matmuls use another instruction
        assert compiled.mma > 0
    if element != "fp32" and whole:
        assert compiled.async_copies > 0, "weights must be copied behind the products"
