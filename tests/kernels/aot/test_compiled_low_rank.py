"""The compiler's output for the low-rank matmuls of adapters, for GPUs that are not present."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.kernels.gpu.low_rank import expand_kernel, rank_block, shrink_kernel
from pagemill.kernels.gpu.tuning import LAUNCHES
from pagemill.kernels.types.low_rank import ENTRY_NUMBERS, TILE_ROWS
from tests.kernels.aot.compiler import compile_kernel
from tests.kernels.aot.specializations import row_tile, typed


def shrink_arguments(element: str, rank: int) -> dict[str, Any]:
    return {
        **typed("*fp32", "products_ptr"),
        **typed(f"*{element}", "x_ptr"),
        **typed("*i32", "order_ptr tiles_ptr"),
        **typed("*i64", "entries_ptr"),
        **typed("i32", "num_adapted in_features split_inputs stride_x_row stride_entries_slot max_rank"),
        "ENTRY": ENTRY_NUMBERS,
        "BLOCK_R": rank_block(rank),
        "BLOCK_M": TILE_ROWS,
        "BLOCK_K": LAUNCHES["low_rank_shrink"].block,
    }


def expand_arguments(element: str, rank: int, width_multiple: int) -> dict[str, Any]:
    return {
        **typed(f"*{element}", "out_ptr"),
        **typed("*fp32", "products_ptr"),
        **typed("*i32", "order_ptr tiles_ptr"),
        **typed("*i64", "entries_ptr starts_ptr"),
        **typed("i32", "num_adapted num_splits stride_out_row stride_entries_slot max_rank"),
        "ENTRY": ENTRY_NUMBERS,
        "WIDTH_MULTIPLE": width_multiple,
        "BLOCK_R": rank_block(rank),
        "BLOCK_M": TILE_ROWS,
        "BLOCK_N": LAUNCHES["low_rank_expand"].block,
    }


def _cases() -> list[Any]:
    cases = []
    for capability in (80, 89, 90, 100, 120):
        for element in ("bf16", "fp16", "fp32"):
            for rank in (16, 64, 256):
                runs_always = capability in (80, 90) and (element, rank) == ("bf16", 64)
                marks = () if runs_always else pytest.mark.slow
                cases.append(
                    pytest.param(
                        element, rank, capability, id=f"sm_{capability}-{element}-{rank}", marks=marks
                    )
                )
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("element", "rank", "capability"), _cases())
def test_both_halves(element: str, rank: int, capability: int) -> None:
    shrunk = compile_kernel(
        shrink_kernel, shrink_arguments(element, rank), capability, row_tile("low_rank_shrink")
    )
    expanded, _ = (
        compile_kernel(
            expand_kernel, expand_arguments(element, rank, multiple), capability, row_tile("low_rank_expand")
        )
        for multiple in (16, 1)
    )
    # Both operands of `shrink`; B, and the outputs that it changes, of `expand`.
    assert shrunk.wide_loads > 1
    assert expanded.wide_loads > 1
    if element != "fp32":
        assert shrunk.mma > 0, "the tensor cores are not used"
