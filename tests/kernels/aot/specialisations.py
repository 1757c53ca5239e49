"""The kernels' parameter lists, as the wrappers launch them."""

from __future__ import annotations

from typing import Any

from pagemill.kernels.gpu.tuning import LAUNCHES, Tile, padded_head_dim

SCALED = ("i8", "fp8e4nv")


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
    return {
        "out_ptr": f"*{element}",
        "partial_ptr": "*fp32" if split else None,
        "lse_ptr": "*fp32" if split else None,
        "query_ptr": f"*{element}",
        "key_cache_ptr": f"*{cache or element}",
        "value_cache_ptr": f"*{cache or element}",
        "key_scales_ptr": "*fp32" if cache in SCALED else None,
        "value_scales_ptr": "*fp32" if cache in SCALED else None,
        "block_tables_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "alibi_slopes_ptr": "*fp32" if alibi else None,
        "sinks_ptr": "*fp32" if sinks else None,
        "scale": "fp32",
        "stride_query_row": "i32",
        "stride_query_head": "i32",
        "stride_cache_block": "i32",
        "stride_cache_head": "i32",
        "stride_table_row": "i32",
        "min_split": "i32",
        "GROUP_SIZE": group_size,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": padded_head_dim(head_dim),
        "BLOCK_SIZE": block_size,
        "SLIDING_WINDOW": sliding_window,
        "SOFTCAP": softcap,
        "SPLIT": split,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "UPCAST": False,
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
    return {
        "out_ptr": f"*{element}",
        "query_ptr": f"*{element}",
        "key_cache_ptr": f"*{cache or element}",
        "value_cache_ptr": f"*{cache or element}",
        "key_scales_ptr": "*fp32" if cache in SCALED else None,
        "value_scales_ptr": "*fp32" if cache in SCALED else None,
        "block_tables_ptr": "*i32",
        "query_start_loc_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "work_list_ptr": "*i32",
        "alibi_slopes_ptr": "*fp32" if alibi else None,
        "sinks_ptr": "*fp32" if sinks else None,
        "scale": "fp32",
        "stride_query_token": "i32",
        "stride_query_head": "i32",
        "stride_cache_block": "i32",
        "stride_cache_head": "i32",
        "stride_table_row": "i32",
        "GROUP_SIZE": group_size,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": padded_head_dim(head_dim),
        "BLOCK_SIZE": block_size,
        "SLIDING_WINDOW": sliding_window,
        "SOFTCAP": softcap,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "UPCAST": False,
    }
