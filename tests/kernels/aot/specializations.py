"""The kernels' parameter lists, as the wrappers launch them."""

from __future__ import annotations

from typing import Any

from pagemill.kernels.gpu.tuning import LAUNCHES, Tile, padded_head_dim

SCALED = ("i8", "fp8e4nv")


def typed(kind: str | None, names: str) -> dict[str, Any]:
    """Parameters of one Triton type, or pointers that this launch omits."""
    return dict.fromkeys(names.split(), kind)


def row_tile(name: str) -> Tile:
    """The launch options of a kernel of `tuning.LAUNCHES`."""
    launch = LAUNCHES[name]
    return Tile(0, 0, launch.num_warps, launch.num_stages)


def decode_arguments(
    element: str,
    head_dim: int,
    group_size: int,
    tile: Tile,
    *,
    cache: str | None = None,
    block_size: int = 16,
    split: bool = True,
    alibi: bool = False,
    sinks: bool = False,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> dict[str, Any]:
    arguments = _attention_arguments(element, head_dim, group_size, tile, cache, block_size)
    return arguments | {
        **typed("*fp32" if split else None, "partial_ptr lse_ptr"),
        **typed("*fp32" if alibi else None, "alibi_slopes_ptr"),
        **typed("*fp32" if sinks else None, "sinks_ptr"),
        **typed("i32", "stride_query_row min_split"),
        "SLIDING_WINDOW": sliding_window,
        "SOFTCAP": softcap,
        "SPLIT": split,
    }


def prefill_arguments(
    element: str,
    head_dim: int,
    group_size: int,
    tile: Tile,
    *,
    cache: str | None = None,
    block_size: int = 16,
    alibi: bool = False,
    sinks: bool = False,
    sliding_window: int = 0,
    softcap: float = 0.0,
) -> dict[str, Any]:
    arguments = _attention_arguments(element, head_dim, group_size, tile, cache, block_size)
    return arguments | {
        **typed("*i32", "query_start_loc_ptr work_list_ptr"),
        **typed("*fp32" if alibi else None, "alibi_slopes_ptr"),
        **typed("*fp32" if sinks else None, "sinks_ptr"),
        **typed("i32", "stride_query_token"),
        "SLIDING_WINDOW": sliding_window,
        "SOFTCAP": softcap,
    }


def _attention_arguments(
    element: str, head_dim: int, group_size: int, tile: Tile, cache: str | None, block_size: int
) -> dict[str, Any]:
    """Parameters of both attention kernels."""
    return {
        **typed(f"*{element}", "out_ptr query_ptr"),
        **typed(f"*{cache or element}", "key_cache_ptr value_cache_ptr"),
        **typed("*fp32" if cache in SCALED else None, "key_scales_ptr value_scales_ptr"),
        **typed("*i32", "block_tables_ptr seq_lens_ptr"),
        **typed("fp32", "scale"),
        **typed("i32", "stride_query_head stride_cache_block stride_cache_head stride_table_row"),
        "GROUP_SIZE": group_size,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": padded_head_dim(head_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "UPCAST": False,
    }
