"""The compiler's output for matmuls with low-bit weights, for GPUs that are not present."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.kernels.gpu.grouped_matmul import grouped_matmul_kernel, widen_kernel
from pagemill.kernels.gpu.tuning import LAUNCHES, MATMUL_TILES, Tile
from pagemill.kernels.types.tiled_weight import LARGEST_CHUNK, SMALLEST_CHUNK
from tests.kernels.aot.compiler import compile_kernel
from tests.kernels.aot.specializations import row_tile, typed

NIBBLES, BYTES, FLOATS = "nibbles", "bytes", "floats"


def arguments(kind: str, element: str, chunk: int, tile: Tile) -> dict[str, Any]:
    return {
        **typed(f"*{element}", "out_ptr x_ptr"),
        **typed("*i8" if kind == BYTES else "*u8", "codes_ptr"),
        **typed("*fp32", "scales_ptr"),
        **typed("*i16" if kind == NIBBLES else None, "zeros_ptr"),
        **typed("i32", "num_rows out_features in_features stride_x_row chunks_per_group"),
        "PACKED": kind == NIBBLES,
        "FLOAT": kind == FLOATS,
        "CHUNK": chunk,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }


def _cases() -> list[Any]:
    cases = []
    for capability in (80, 89, 90, 100, 120):
        for _, size, tile in MATMUL_TILES:
            for kind in (NIBBLES, BYTES, FLOATS):
                for chunk in (LARGEST_CHUNK, SMALLEST_CHUNK):
                    for element in ("fp32",) if size == 4 else ("bf16", "fp16"):
                        # A compilation takes seconds: these are similar to a case that always runs.
                        runs_always = (
                            capability in (80, 90)
                            and (kind, chunk, element) == (NIBBLES, LARGEST_CHUNK, "bf16")
                            and tile.block_m in (16, 128)
                        )
                        name = f"sm_{capability}-{kind}-{chunk}-{element}-{tile.block_m}"
                        marks = () if runs_always else pytest.mark.slow
                        cases.append(
                            pytest.param(kind, element, chunk, tile, capability, id=name, marks=marks)
                        )
    return cases


def _widen_cases() -> list[Any]:
    cases = []
    for capability in (80, 89, 90, 100, 120):
        for kind in (NIBBLES, BYTES, FLOATS):
            for chunk in (LARGEST_CHUNK, SMALLEST_CHUNK):
                runs_always = capability in (80, 90) and (kind, chunk) == (NIBBLES, LARGEST_CHUNK)
                marks = () if runs_always else pytest.mark.slow
                cases += [
                    pytest.param(
                        kind, element, chunk, capability,
                        id=f"sm_{capability}-{kind}-{chunk}-{element}", marks=marks,
                    )
                    for element in ("bf16", "fp16")
                ]  # fmt: skip
    return cases


@pytest.mark.parametrize(("kind", "element", "chunk", "capability"), _widen_cases())
def test_widened_weights(kind: str, element: str, chunk: int, capability: int) -> None:
    given = {
        **typed(f"*{element}", "out_ptr"),
        **typed("*i8" if kind == BYTES else "*u8", "codes_ptr"),
        **typed("*fp32", "scales_ptr"),
        **typed("*i16" if kind == NIBBLES else None, "zeros_ptr"),
        **typed("i32", "num_chunks chunks_per_group"),
        "PACKED": kind == NIBBLES,
        "FLOAT": kind == FLOATS,
        "CHUNK": chunk,
        "BLOCK": LAUNCHES["widen"].block // chunk,
    }
    compiled = compile_kernel(widen_kernel, given, capability, row_tile("widen"))
    assert compiled.wide_loads > 0


@pytest.mark.parametrize(("kind", "element", "chunk", "tile", "capability"), _cases())
def test_product(kind: str, element: str, chunk: int, tile: Tile, capability: int) -> None:
    compiled = compile_kernel(grouped_matmul_kernel, arguments(kind, element, chunk, tile), capability, tile)
    if chunk == LARGEST_CHUNK:
        assert compiled.wide_loads > 0
    if element != "fp32" and capability == 90 and tile.block_m >= 64:
        assert compiled.wgmma > 0, "rows in plenty must reach Hopper's tensor cores"
