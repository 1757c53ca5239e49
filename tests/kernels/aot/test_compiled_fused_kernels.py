"""The compiler's output for the fused row kernels and for sampling, for GPUs that are not present."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.kernels.gpu import sampling
from pagemill.kernels.gpu.norm import rms_norm_kernel
from pagemill.kernels.gpu.rotary_cache import block_tokens, rotary_cache_kernel
from pagemill.kernels.gpu.sampling import (
    gumbel_argmax_kernel,
    sampling_band_kernel,
    sampling_cuts_kernel,
    sampling_histogram_kernel,
)
from pagemill.kernels.gpu.silu import silu_and_mul_kernel
from pagemill.kernels.gpu.tuning import LAUNCHES, Tile, next_power_of_2, row_warps
from pagemill.kernels.types.layer_cache import FP8_LIMIT, INTEGER_LIMIT
from tests.kernels.aot.compiler import compile_kernel
from tests.kernels.aot.specializations import row_tile, typed

pytestmark = pytest.mark.parametrize("capability", [80, 90], ids=["sm_80", "sm_90"])

slow = pytest.mark.slow  # slow to compile, and similar to a case that always runs


@pytest.mark.parametrize("size", [4096, pytest.param(1024, marks=slow), pytest.param(16384, marks=slow)])
@pytest.mark.parametrize("adds", [True, pytest.param(False, marks=slow)])
def test_norms(size: int, adds: bool, capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*bf16", "out_ptr x_ptr weight_ptr"),
        **typed(None, "numbers_ptr scales_ptr"),
        **typed("*bf16" if adds else None, "total_ptr residual_ptr"),
        **typed("i32", "stride_x_row stride_residual_row"),
        **typed("fp32", "eps"),
        "SIZE": size,
        "SIZE_PADDED": next_power_of_2(size),
        "LIMIT": 0.0,
        "INTEGER": False,
    }
    compiled = compile_kernel(rms_norm_kernel, arguments, capability, Tile(0, 0, row_warps(size), 1))
    assert compiled.wide_loads > 0


def test_gated_activation(capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*bf16", "out_ptr gate_up_ptr"),
        **typed("i32", "size stride_row"),
        "BLOCK": LAUNCHES["silu_and_mul"].block,
    }
    compiled = compile_kernel(silu_and_mul_kernel, arguments, capability, row_tile("silu_and_mul"))
    assert compiled.wide_loads > 0


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "norm", "cache"),
    [
        (128, 128, True, "u8"),
        (256, 256, False, "bf16"),
        pytest.param(128, 128, True, "bf16", marks=slow),
        pytest.param(64, 64, False, "bf16", marks=slow),
        pytest.param(80, 32, False, "i8", marks=slow),
        pytest.param(256, 256, True, "u8", marks=slow),
        pytest.param(128, 0, False, "bf16", marks=slow),
    ],
)
def test_rotation_and_cache(head_dim: int, rotary_dim: int, norm: bool, cache: str, capability: int) -> None:
    scales = None if cache == "bf16" else "*fp32"
    weight = "*bf16" if norm else None
    angles = "*bf16" if rotary_dim else None
    arguments: dict[str, Any] = {
        **typed("*bf16", "out_ptr query_ptr key_ptr value_ptr"),
        **typed(weight, "query_weight_ptr key_weight_ptr"),
        **typed(angles, "cos_ptr sin_ptr"),
        **typed(f"*{cache}", "key_cache_ptr value_cache_ptr"),
        **typed(scales, "key_scales_ptr value_scales_ptr"),
        **typed("*i64", "slot_mapping_ptr"),
        **typed(
            "i32",
            "num_tokens stride_query_token stride_query_head stride_key_token stride_key_head stride_value_token",
        ),
        **typed("i32", "stride_value_head stride_angles stride_cache_block stride_cache_head"),
        **typed("fp32", "eps"),
        "NUM_HEADS": 32,
        "BLOCK_SIZE": 16,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": next_power_of_2(head_dim),
        "ROTARY_DIM": rotary_dim,
        "BLOCK_TOKENS": block_tokens(head_dim),
        "LIMIT": {"i8": INTEGER_LIMIT, "u8": FP8_LIMIT}.get(cache, 0.0),
        "INTEGER": cache == "i8",
    }
    compiled = compile_kernel(rotary_cache_kernel, arguments, capability, row_tile("rotary_cache"))
    assert compiled.wide_loads > 0


_FILTERED_ROWS = {
    "logits_ptr": "*fp32", "peaks_ptr": "*fp32", "temperatures_ptr": "*fp32", "top_k_ptr": "*i32",
    "top_p_ptr": "*fp64",
}  # fmt: skip


def test_sampling_histogram(capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*i32", "histograms_ptr counters_ptr"),
        **typed("*i64", "sums_ptr"),
        **typed("i32", "vocab_size split_size stride_row"),
        **_FILTERED_ROWS,
        "BLOCK": LAUNCHES["sampling_histogram"].block,
    }
    compiled = compile_kernel(
        sampling_histogram_kernel, arguments, capability, row_tile("sampling_histogram")
    )
    assert compiled.wide_loads > 0


def test_sampling_band(capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*fp32", "bands_ptr"),
        **typed("*i32", "sizes_ptr counters_ptr histograms_ptr"),
        **typed("*i64", "sums_ptr"),
        **typed("i32", "vocab_size split_size stride_row"),
        **_FILTERED_ROWS,
        "CAPACITY": sampling._CAPACITY,
        "SPLITS": sampling._MAX_SPLITS,
        "BLOCK": LAUNCHES["sampling_band"].block,
    }
    compiled = compile_kernel(sampling_band_kernel, arguments, capability, row_tile("sampling_band"))
    assert compiled.wide_loads > 0


@pytest.mark.slow
def test_sampling_cuts(capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*i32", "cuts_ptr sizes_ptr"),
        **typed("*fp32", "bands_ptr log_min_p_ptr"),
        **typed("*i64", "sums_ptr"),
        **typed("i32", "vocab_size stride_row"),
        **_FILTERED_ROWS,
        "CAPACITY": sampling._CAPACITY,
        "BLOCK": LAUNCHES["sampling_cuts"].block,
    }
    compile_kernel(sampling_cuts_kernel, arguments, capability, row_tile("sampling_cuts"))


@pytest.mark.parametrize("filters", [True, pytest.param(False, marks=slow)])
def test_drawing(filters: bool, capability: int) -> None:
    arguments: dict[str, Any] = {
        **typed("*fp32", "best_ptr logits_ptr peaks_ptr temperatures_ptr"),
        **typed("*i64", "ids_ptr seeds_ptr sample_indices_ptr positions_ptr"),
        **typed("*i32" if filters else None, "cuts_ptr"),
        **typed("i32", "vocab_size split_size stride_row"),
        "BLOCK": LAUNCHES["gumbel_argmax"].block,
    }
    compiled = compile_kernel(gumbel_argmax_kernel, arguments, capability, row_tile("gumbel_argmax"))
    assert compiled.wide_loads > 0
