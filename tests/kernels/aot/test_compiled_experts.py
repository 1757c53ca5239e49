"""The compiler's output for the rows of a mixture of experts, for GPUs that are not present."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.kernels.gpu.experts import (
    clamped_swiglu_kernel,
    combine_experts_kernel,
    expert_places_kernel,
    spread_rows_kernel,
)
from pagemill.kernels.gpu.route import route_kernel
from pagemill.kernels.gpu.tuning import LAUNCHES, Tile, next_power_of_2, row_warps
from tests.kernels.aot.compiler import compile_kernel
from tests.kernels.aot.specializations import row_tile, typed

pytestmark = pytest.mark.parametrize("capability", [80, 90], ids=["sm_80", "sm_90"])

slow = pytest.mark.slow  # slow to compile, and similar to a case that always runs


@pytest.mark.parametrize(
    ("num_experts", "top_k", "is_plain"),
    [(128, 8, True), pytest.param(512, 22, False, marks=slow), pytest.param(8, 1, False, marks=slow)],
)
def test_route(num_experts: int, top_k: int, is_plain: bool, capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*fp32", "weights_ptr logits_ptr"),
        **typed(None if is_plain else "*fp32", "bias_ptr"),
        **typed("*i64", "experts_ptr"),
        **typed("i32", "stride_row"),
        **typed("fp32", "epsilon scale"),
        "SIGMOID": not is_plain,
        "NORMALIZES": True,
        "NUM_EXPERTS": num_experts,
        "NUM_EXPERTS_PADDED": next_power_of_2(num_experts),
        "TOP_K": top_k,
        "TOP_K_PADDED": next_power_of_2(top_k),
    }
    compile_kernel(route_kernel, arguments, capability, Tile(0, 0, row_warps(num_experts), 3))


def test_places(capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*i64", "places_ptr offsets_ptr chosen_ptr"),
        **typed("i32", "num_choices"),
        "BLOCK": LAUNCHES["expert_places"].block,
    }
    compile_kernel(expert_places_kernel, arguments, capability, row_tile("expert_places"))


@pytest.mark.parametrize("top_k", [8, pytest.param(1, marks=slow), pytest.param(22, marks=slow)])
@pytest.mark.parametrize("element", ["bf16", pytest.param("fp32", marks=slow)])
def test_rows(element: str, top_k: int, capability: int) -> None:
    shared: dict[str, Any] = {
        **typed(f"*{element}", "out_ptr"),
        **typed("*i64", "places_ptr"),
        **typed("i32", "size"),
        "TOP_K": top_k,
        "BLOCK": LAUNCHES["expert_rows"].block,
    }
    spread = {**shared, **typed(f"*{element}", "x_ptr"), **typed("i32", "stride_x_row")}
    combined = {**shared, **typed(f"*{element}", "rows_ptr"), **typed("*fp32", "weights_ptr")}
    for kernel, arguments in ((spread_rows_kernel, spread), (combine_experts_kernel, combined)):
        compiled = compile_kernel(kernel, arguments, capability, row_tile("expert_rows"))
        assert compiled.wide_loads > 0


def test_clamped_swiglu(capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*bf16", "out_ptr gate_up_ptr"),
        **typed("i32", "size stride_row"),
        **typed("fp32", "alpha limit"),
        "BLOCK": LAUNCHES["silu_and_mul"].block,
    }
    compiled = compile_kernel(clamped_swiglu_kernel, arguments, capability, row_tile("silu_and_mul"))
    assert compiled.wide_loads > 0
