"""The compiler's output for the kernels' other shapes and options, for GPUs that are not present."""

from __future__ import annotations

import pytest

from pagemill.kernels.gpu.attention_decode import merge_splits_kernel, paged_attention_decode_kernel
from pagemill.kernels.gpu.attention_prefill import paged_attention_prefill_kernel
from pagemill.kernels.gpu.cache import reshape_and_cache_kernel
from pagemill.kernels.gpu.copy_blocks import copy_blocks_kernel
from pagemill.kernels.gpu.tuning import LAUNCHES, decode_tile, prefill_tile
from pagemill.kernels.types.layer_cache import FP8_LIMIT, INTEGER_LIMIT
from tests.kernels.aot.compiler import Compiled, compile_kernel
from tests.kernels.aot.specializations import SCALED, decode_arguments, prefill_arguments, row_tile, typed

pytestmark = pytest.mark.parametrize("capability", [80, 90], ids=["sm_80", "sm_90"])

slow = pytest.mark.slow  # slow to compile, and similar to a case that always runs


def _prefill(
    element: str, head_dim: int, capability: int, *, group_size: int = 4, **options: object
) -> Compiled:
    tile = prefill_tile(
        head_dim,
        4 if element == "fp32" else 2,
        (capability // 10, capability % 10),
        is_scaled=options.get("cache") in SCALED,
    )
    arguments = prefill_arguments(element, head_dim, group_size, tile, **options)  # type: ignore[arg-type]
    return compile_kernel(paged_attention_prefill_kernel, arguments, capability, tile)


def _decode(element: str, head_dim: int, group_size: int, capability: int, **options: object) -> Compiled:
    is_scaled = options.get("cache") in SCALED
    tile = decode_tile(
        head_dim,
        group_size,
        4 if element == "fp32" else 2,
        (capability // 10, capability % 10),
        is_scaled=is_scaled,
    )
    arguments = decode_arguments(element, head_dim, group_size, tile, **options)  # type: ignore[arg-type]
    return compile_kernel(paged_attention_decode_kernel, arguments, capability, tile)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [80, 64, 96])
def test_other_head_dims(head_dim: int, capability: int) -> None:
    _prefill("bf16", head_dim, capability, group_size=1)
    decode = _decode("bf16", head_dim, 1, capability, split=False)
    assert decode.wide_loads >= 16, "padding to a power of two must not cut the loads up"


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, *SCALED])
def test_sinks_in_the_sizes_of_gpt_oss(cache: str | None, capability: int) -> None:
    if cache == "fp8e4nv" and capability < 89:
        pytest.skip("no fp8 before sm_89: the engine refuses it there")
    for sliding_window in (0, 128):
        options = {"cache": cache, "sinks": True, "sliding_window": sliding_window}
        _prefill("bf16", 64, capability, group_size=8, **options)
        _decode("bf16", 64, 8, capability, split=False, **options)


@pytest.mark.slow
def test_heads_smaller_than_a_tensor_core_product(capability: int) -> None:
    _prefill("bf16", 8, capability)
    _decode("bf16", 8, 4, capability)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"alibi": True, "block_size": 64},
        {"alibi": True, "block_size": 80},
        {"sliding_window": 4096, "softcap": 50.0},
        {"sliding_window": -8192},
        {"sinks": True, "sliding_window": 128},
        {"alibi": True},
        {"block_size": 64},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_options(options: dict[str, object], capability: int) -> None:
    """An option costs registers: tested where the fewest are free. No model with sinks has heads of more than 128."""
    _prefill("bf16", 128, capability, group_size=7, **options)
    if "sinks" not in options:
        _prefill("bf16", 256, capability, group_size=7, **options)
    _decode("bf16", 256, 71, capability, split=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [128, 64, 256])
def test_fp32(head_dim: int, capability: int) -> None:
    """Exact matmuls, which tensor cores do not compute."""
    assert _prefill("fp32", head_dim, capability).mma == 0
    assert _decode("fp32", head_dim, 4, capability).mma == 0


@pytest.mark.slow
@pytest.mark.parametrize("cache", SCALED)
@pytest.mark.parametrize("head_dim", [128, 256, 64, 80])
def test_scaled_caches(head_dim: int, cache: str, capability: int) -> None:
    """Converting a tile needs registers, most of all at the widest heads and with the largest groups."""
    if cache == "fp8e4nv" and capability < 89:
        pytest.skip("no fp8 before sm_89: the engine refuses it there")
    prefill = _prefill("bf16", head_dim, capability, cache=cache)
    assert (prefill.wgmma if capability == 90 else prefill.mma) > 0
    for group_size in (4, 71):
        _decode("bf16", head_dim, group_size, capability, cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [None, "*fp32"])
def test_merging_splits(sinks: str | None, capability: int) -> None:
    for head_dim in (80, 256):
        arguments = {
            **typed("*bf16", "out_ptr"),
            **typed("*fp32", "partial_ptr lse_ptr"),
            **typed("*i32", "seq_lens_ptr"),
            **typed(sinks, "sinks_ptr"),
            **typed("i32", "num_splits min_split"),
            "HEAD_DIM": head_dim,
            "HEAD_DIM_PADDED": 128 if head_dim == 80 else 256,
            "SLIDING_WINDOW": 0,
            "BLOCK_N": 64,
            "MERGE_SPLITS": LAUNCHES["merge_splits"].block,
        }
        compiled = compile_kernel(merge_splits_kernel, arguments, capability, row_tile("merge_splits"))
        assert compiled.wide_loads > 0


@pytest.mark.parametrize("element", ["bf16", "i8", "u8"])
def test_writing_the_cache(element: str, capability: int) -> None:
    """u8 are the bytes of fp8."""
    scales = None if element == "bf16" else "*fp32"
    arguments: dict[str, object] = {
        **typed("*bf16", "key_ptr value_ptr"),
        **typed(f"*{element}", "key_cache_ptr value_cache_ptr"),
        **typed(scales, "key_scales_ptr value_scales_ptr"),
        **typed("*i64", "slot_mapping_ptr"),
        **typed("i32", "num_tokens stride_key_token stride_key_head stride_value_token"),
        **typed("i32", "stride_value_head stride_cache_block stride_cache_head"),
        "BLOCK_SIZE": 16,
        "HEAD_DIM": 80,
        "HEAD_DIM_PADDED": 128,
        "BLOCK_TOKENS": LAUNCHES["reshape_and_cache"].block,
        "LIMIT": {"i8": INTEGER_LIMIT, "u8": FP8_LIMIT}.get(element, 0.0),
        "INTEGER": element == "i8",
    }
    compiled = compile_kernel(reshape_and_cache_kernel, arguments, capability, row_tile("reshape_and_cache"))
    assert compiled.wide_loads > 0


def test_copying_blocks(capability: int) -> None:
    arguments: dict[str, object] = {
        **typed("*bf16", "key_cache_ptr value_cache_ptr"),
        **typed("*i64", "block_pairs_ptr"),
        **typed("i32", "elements_per_block stride_cache_block"),
        "CHUNK": LAUNCHES["copy_blocks"].block,
    }
    compiled = compile_kernel(copy_blocks_kernel, arguments, capability, row_tile("copy_blocks"))
    assert compiled.wide_loads > 0
