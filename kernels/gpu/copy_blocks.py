"""Copy complete blocks of one layer's cache, for copy-on-write when a shared partial block is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tuning import LAUNCHES
from pagemill.kernels.types.transfer import to_device

# Four 16-byte accesses per thread with four warps and two bytes per element. Not yet measured on a GPU.
_LAUNCH = LAUNCHES["copy_blocks"]


@triton.jit
def copy_blocks_kernel(
    key_cache_ptr,  # [num_blocks, elements_per_block]
    value_cache_ptr,
    block_pairs_ptr,  # [num_pairs, 2] int64: source, destination
    elements_per_block,
    stride_cache_block,
    CHUNK: tl.constexpr,
):
    pair = tl.program_id(0)
    source = tl.load(block_pairs_ptr + pair * 2) * stride_cache_block
    destination = tl.load(block_pairs_ptr + pair * 2 + 1) * stride_cache_block
    elements = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_element = elements < elements_per_block
    key = tl.load(key_cache_ptr + source + elements, mask=is_element, other=0.0)
    value = tl.load(value_cache_ptr + source + elements, mask=is_element, other=0.0)
    tl.store(key_cache_ptr + destination + elements, key, mask=is_element)
    tl.store(value_cache_ptr + destination + elements, value, mask=is_element)


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
) -> None:
    """See `pagemill.kernels.dispatch.copy_blocks`."""
    if not block_pairs:
        return
    pairs = to_device(np.array(block_pairs, dtype=np.int64), key_cache.device)
    elements = key_cache[0].numel()
    copy_blocks_kernel[(len(block_pairs), triton.cdiv(elements, _LAUNCH.block))](
        key_cache,
        value_cache,
        pairs,
        elements,
        key_cache.stride(0),
        CHUNK=_LAUNCH.block,
        num_warps=_LAUNCH.num_warps,
    )
