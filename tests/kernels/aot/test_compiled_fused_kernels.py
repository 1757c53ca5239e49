"""The compiler's output for the fused row kernels and for sampling, for GPUs that are not here."""

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
from tests.kernels.aot.compiler import check_resources, compile_kernel
from tests.kernels.aot.specialisations import row_tile

pytestmark = pytest.mark.parametrize("capability", [80, 90], ids=["sm_80", "sm_90"])

slow = pytest.mark.slow  # a compilation takes seconds: what differs little from a case that runs always


@pytest.mark.parametrize("size", [4096, pytest.param(1024, marks=slow), pytest.param(16384, marks=slow)])
@pytest.mark.parametrize("adds", [True, pytest.param(False, marks=slow)])
def test_norms(size: int, adds: bool, capability: int) -> None:
    arguments: dict[str, Any] = {
        "out_ptr": "*bf16",
        "numbers_ptr": None,
        "scales_ptr": None,
        "total_ptr": "*bf16" if adds else None,
        "x_ptr": "*bf16",
        "residual_ptr": "*bf16" if adds else None,
        "weight_ptr": "*bf16",
        "stride_x_row": "i32",
        "stride_residual_row": "i32",
        "eps": "fp32",
        "SIZE": size,
        "SIZE_PADDED": next_power_of_2(size),
        "LIMIT": 0.0,
        "INTEGER": False,
    }
    compiled = compile_kernel(rms_norm_kernel, arguments, capability, Tile(0, 0, row_warps(size), 1))
    check_resources(compiled, capability)
    assert compiled.wide_loads > 0


def test_gated_activation(capability: int) -> None:
    arguments: dict[str, Any] = {
        "out_ptr": "*bf16", "gate_up_ptr": "*bf16", "size": "i32", "stride_row": "i32",
        "BLOCK": LAUNCHES["silu_and_mul"].block,
    }  # fmt: skip
    compiled = compile_kernel(silu_and_mul_kernel, arguments, capability, row_tile("silu_and_mul"))
    check_resources(compiled, capability)
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
        "out_ptr": "*bf16",
        "query_ptr": "*bf16",
        "key_ptr": "*bf16",
        "value_ptr": "*bf16",
        "query_weight_ptr": weight,
        "key_weight_ptr": weight,
        "cos_ptr": angles,
        "sin_ptr": angles,
        "key_cache_ptr": f"*{cache}",
        "value_cache_ptr": f"*{cache}",
        "key_scales_ptr": scales,
        "value_scales_ptr": scales,
        "slot_mapping_ptr": "*i64",
        "num_tokens": "i32",
        "stride_query_token": "i32",
        "stride_query_head": "i32",
        "stride_key_token": "i32",
        "stride_key_head": "i32",
        "stride_value_token": "i32",
        "stride_value_head": "i32",
        "stride_angles": "i32",
        "stride_cache_block": "i32",
        "stride_cache_head": "i32",
        "eps": "fp32",
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
    check_resources(compiled, capability)
    assert compiled.wide_loads > 0


_FILTERED_ROWS = {
    "logits_ptr": "*fp32", "peaks_ptr": "*fp32", "temperatures_ptr": "*fp32", "top_k_ptr": "*i32",
    "top_p_ptr": "*fp64",
}  # fmt: skip


def test_sampling_histogram(capability: int) -> None:
    arguments: dict[str, Any] = {
        "histograms_ptr": "*i32",
        "counters_ptr": "*i32",
        "sums_ptr": "*i64",
        **_FILTERED_ROWS,
        "vocab_size": "i32",
        "split_size": "i32",
        "stride_row": "i32",
        "BLOCK": LAUNCHES["sampling_histogram"].block,
    }
    compiled = compile_kernel(
        sampling_histogram_kernel, arguments, capability, row_tile("sampling_histogram")
    )
    check_resources(compiled, capability)
    assert compiled.wide_loads > 0


def test_sampling_band(capability: int) -> None:
    arguments: dict[str, Any] = {
        "bands_ptr": "*fp32",
        "sizes_ptr": "*i32",
        "counters_ptr": "*i32",
        "sums_ptr": "*i64",
        "histograms_ptr": "*i32",
        **_FILTERED_ROWS,
        "vocab_size": "i32",
        "split_size": "i32",
        "stride_row": "i32",
        "CAPACITY": sampling._CAPACITY,
        "SPLITS": sampling._MAX_SPLITS,
        "BLOCK": LAUNCHES["sampling_band"].block,
    }
    compiled = compile_kernel(sampling_band_kernel, arguments, capability, row_tile("sampling_band"))
    check_resources(compiled, capability)
    assert compiled.wide_loads > 0


@pytest.mark.slow
def test_sampling_cuts(capability: int) -> None:
    arguments: dict[str, Any] = {
        "cuts_ptr": "*i32",
        "bands_ptr": "*fp32",
        "sizes_ptr": "*i32",
        "sums_ptr": "*i64",
        **_FILTERED_ROWS,
        "log_min_p_ptr": "*fp32",
        "vocab_size": "i32",
        "stride_row": "i32",
        "CAPACITY": sampling._CAPACITY,
        "BLOCK": LAUNCHES["sampling_cuts"].block,
    }
    compiled = compile_kernel(sampling_cuts_kernel, arguments, capability, row_tile("sampling_cuts"))
    check_resources(compiled, capability)


@pytest.mark.parametrize("filters", [True, pytest.param(False, marks=slow)])
def test_drawing(filters: bool, capability: int) -> None:
    arguments: dict[str, Any] = {
        "best_ptr": "*fp32",
        "ids_ptr": "*i64",
        "logits_ptr": "*fp32",
        "peaks_ptr": "*fp32",
        "cuts_ptr": "*i32" if filters else None,
        "temperatures_ptr": "*fp32",
        "seeds_ptr": "*i64",
        "sample_indices_ptr": "*i64",
        "positions_ptr": "*i64",
        "vocab_size": "i32",
        "split_size": "i32",
        "stride_row": "i32",
        "BLOCK": LAUNCHES["gumbel_argmax"].block,
    }
    compiled = compile_kernel(gumbel_argmax_kernel, arguments, capability, row_tile("gumbel_argmax"))
    check_resources(compiled, capability)
    assert compiled.wide_loads > 0
