"""The recurrences' kernels, compiled ahead of time for GPUs that are not present."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.kernels.gpu.recurrence import gated_delta_kernel, part_of, state_space_kernel
from pagemill.kernels.gpu.tuning import LAUNCHES
from tests.kernels.aot.compiler import compile_kernel
from tests.kernels.aot.specializations import row_tile

_FP32 = ("states_ptr", "out_ptr")
_SIZES = ("length", "heads")
KERNELS = {
    "gated_delta_rule": (
        gated_delta_kernel,
        ("query_ptr", "key_ptr", "value_ptr", "decay_ptr", "beta_ptr"),
        {"key_heads": "i32", "key_dim": "i32", "value_dim": "i32", "scale": "fp32", "eps": "fp32"},
        ("BLOCK_K", "BLOCK_V"),
        row_tile("gated_delta_rule"),
    ),
    "state_space_scan": (
        state_space_kernel,
        ("x_ptr", "steps_ptr", "decay_ptr", "write_ptr", "read_ptr"),
        {"groups": "i32", "head_dim": "i32", "state_size": "i32"},
        ("BLOCK_S", "BLOCK_D"),
        row_tile("state_space_scan"),
    ),
}


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize(
    "size", [pytest.param(64, marks=pytest.mark.slow), 128, pytest.param(256, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_a_state_stays_in_registers(name: str, capability: int, size: int, is_new: bool) -> None:
    kernel, pointers, sizes, (whole, part), launch = KERNELS[name]
    arguments: dict[str, Any] = dict.fromkeys((*_FP32, *pointers), "*fp32")
    arguments |= {"slots_ptr": "*i64"} | dict.fromkeys(_SIZES, "i32") | sizes
    if name == "state_space_scan":
        arguments["DECAY_SIZE"] = 1 if is_new else size
    arguments |= {"IS_NEW": is_new, whole: size, part: part_of(size, LAUNCHES[name].block)}
    compile_kernel(kernel, arguments, capability, launch)
