"""The compiler's output for 8-bit matmuls and for rounding to 8 bits, for GPUs that are not present."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.kernels.gpu.norm import rms_norm_kernel
from pagemill.kernels.gpu.quantize import quantize_rows_kernel
from pagemill.kernels.gpu.scaled_matmul import scaled_matmul_kernel
from pagemill.kernels.gpu.tuning import (
    LAUNCHES,
    SCALED_MATMUL_INPUTS,
    SCALED_MATMUL_TILES,
    Tile,
    next_power_of_2,
    row_warps,
)
from pagemill.kernels.types.layer_cache import FP8_LIMIT, INTEGER_LIMIT
from tests.kernels.aot.compiler import compile_kernel
from tests.kernels.aot.specializations import row_tile, typed

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
INTEGERS, FLOATS = "i8", "fp8e4nv"

slow = pytest.mark.slow  # slow to compile, and similar to a case that always runs


def product_arguments(numbers: str, element: str, tile: Tile, *, whole: bool) -> dict[str, Any]:
    return {
        **typed(f"*{element}", "out_ptr bias_ptr"),
        **typed(f"*{numbers}", "rows_ptr weight_ptr"),
        **typed("*fp32", "row_scales_ptr weight_scales_ptr"),
        **typed("i32", "num_rows out_features in_features"),
        "INTEGER": numbers == INTEGERS,
        "WHOLE": whole,
        "GROUP": 8,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": SCALED_MATMUL_INPUTS,
    }


def _products() -> list[Any]:
    cases = []
    for capability in ARCHITECTURES:
        for _, tile in SCALED_MATMUL_TILES:
            for numbers in (INTEGERS, FLOATS) if capability >= 89 else (INTEGERS,):
                for element, whole in (("bf16", True), ("fp16", False), ("fp32", True)):
                    runs_always = element == "bf16" and tile.block_m in (16, 128)
                    name = f"sm_{capability}-{numbers}-{element}-{tile.block_m}"
                    marks = () if runs_always else slow
                    cases.append(
                        pytest.param(numbers, element, whole, tile, capability, id=name, marks=marks)
                    )
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("numbers", "element", "whole", "tile", "capability"), _products())
def test_product(numbers: str, element: str, whole: bool, tile: Tile, capability: int) -> None:
    arguments = product_arguments(numbers, element, tile, whole=whole)
    compiled = compile_kernel(scaled_matmul_kernel, arguments, capability, tile, fp_fusion=False)
    if capability == 100:
        return  # its matmuls use another instruction
    assert compiled.async_copies > 0, "weights must be copied behind the products"
    if capability == 90 and tile.block_m >= 64:
        assert compiled.wgmma8 > 0
    elif capability == 90 and numbers == FLOATS:
        assert compiled.mma > 0  # dequantized: only wgmma, for 64 rows and more, multiplies e4m3 there
    else:
        assert compiled.mma8 > 0, "the tensor cores are not used"


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("integer", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("gated", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("size", [LAUNCHES["quantize_rows"].block, pytest.param(1024, marks=slow)])
def test_quantizing(size: int, gated: bool, integer: bool, capability: int) -> None:
    assert row_warps(size) <= row_tile("quantize_rows").num_warps
    arguments: dict[str, Any] = {
        **typed("*i8" if integer else "*u8", "numbers_ptr"),
        **typed("*fp32", "scales_ptr"),
        **typed("*bf16", "kept_ptr x_ptr"),
        **typed("i32", "size stride_x_row"),
        "GATED": gated,
        "LIMIT": INTEGER_LIMIT if integer else FP8_LIMIT,
        "INTEGER": integer,
        "BLOCK": size,
    }
    tile = Tile(0, 0, row_warps(size), 3)  # Triton's default number of stages, as at the launch
    compiled = compile_kernel(quantize_rows_kernel, arguments, capability, tile, fp_fusion=False)
    assert compiled.wide_loads > 0


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("integer", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("size", [4096, pytest.param(1024, marks=slow), pytest.param(16384, marks=slow)])
def test_norms_that_quantize(size: int, integer: bool, capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*bf16", "out_ptr total_ptr x_ptr residual_ptr weight_ptr"),
        **typed("*i8" if integer else "*u8", "numbers_ptr"),
        **typed("*fp32", "scales_ptr"),
        **typed("i32", "stride_x_row stride_residual_row"),
        **typed("fp32", "eps"),
        "SIZE": size,
        "SIZE_PADDED": next_power_of_2(size),
        "LIMIT": INTEGER_LIMIT if integer else FP8_LIMIT,
        "INTEGER": integer,
    }
    tile = Tile(0, 0, row_warps(size), 1)
    compiled = compile_kernel(rms_norm_kernel, arguments, capability, tile, fp_fusion=False)
    assert compiled.wide_loads > 0
