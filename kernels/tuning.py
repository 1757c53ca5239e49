"""Tile shapes of the attention kernels, by plain if and else.

Never autotuned: a serving process must not time kernels on its first requests, a key lookup costs tens of
microseconds per launch, and a captured graph could not re-tune. The tests compile every entry ahead of time for
sm_80 and sm_90, and refuse spills and too much shared memory. None has been measured on a GPU yet: an entry's
"because" is what the compiler's output showed (Triton 3.9).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

# Compute capability and multiprocessors assumed where there is no device to ask: Triton's interpreter.
_ASSUMED_CAPABILITY = (9, 0)
_ASSUMED_MULTIPROCESSORS = 1

# Below this many tokens a split's launch and merge cost more than they spread.
MIN_SPLIT_TOKENS = 256
# Bounds the partial results: 64 * head_dim floats per head and row.
MAX_SPLITS = 64
# Parts of a vocabulary that are drawn from side by side.
MAX_SAMPLING_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """A kernel's shape: query rows and keys per step, and how Triton spreads and pipelines them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Because fp32 products (ieee, no tf32) run on the plain cores with both operands in registers: any larger, or at
# four warps, sm_90 spills from 128 dims on. fp32 is for comparisons and exactness, not for speed.
_FP32_TILE = Tile(block_m=16, block_n=32, num_warps=8, num_stages=1)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, for n >= 1."""
    return 1 << (n - 1).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile of heads: a power of two, and no fewer than the 16 that a tensor-core product sums over."""
    return max(16, next_power_of_2(head_dim))


def row_warps(size: int) -> int:
    """Warps of a program that holds a whole row of `size` numbers: 16 numbers a thread, as far as warps go."""
    return max(1, min(16, next_power_of_2(size) // 512))


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """The device's compute capability, or the newest one tuned for when kernels are interpreted."""
    if device.type != "cuda":
        return _ASSUMED_CAPABILITY
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run truly side by side on the device."""
    if device.type != "cuda":
        return _ASSUMED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode_tile(head_dim: int, group_size: int, element_size: int, *, is_scaled: bool = False) -> Tile:
    """The decode kernel's tile for one KV head's `group_size` query heads.

    Rows are the query heads of a group, padded to the 16 that a tensor-core product takes. A group larger than
    `block_m` is cut into several programs; each of them reads the keys again, from the L2 cache if all is well.
    `element_size` is the queries'; the tiles of an `is_scaled` cache pass through registers on their way.
    """
    padded = next_power_of_2(head_dim)
    rows = max(16, next_power_of_2(group_size))
    if element_size >= 4:
        return _FP32_TILE
    if padded >= 256:
        if rows >= 64:
            # Because 128 rows of 256 dims spill, and so do 64 at four warps.
            return Tile(block_m=64, block_n=32, num_warps=8, num_stages=2)
        # Because converting fp8 spills at three stages.
        return Tile(block_m=rows, block_n=32, num_warps=4, num_stages=2 if is_scaled else 3)
    if rows >= 128:
        return Tile(block_m=128, block_n=64, num_warps=8, num_stages=2)
    if rows == 64:
        return Tile(block_m=64, block_n=64, num_warps=4, num_stages=2)
    # Because 16 rows over 64 keys of 128 dims take 96 registers and 39 KB on sm_90: five programs to a
    # multiprocessor, enough bytes in flight to cover the memory's latency.
    # Of a scaled cache, two stages: three spill where a head's dims must be masked.
    return Tile(block_m=rows, block_n=64, num_warps=4, num_stages=2 if is_scaled else 3)


def prefill_tile(
    head_dim: int, element_size: int, capability: tuple[int, int], *, is_scaled: bool = False
) -> Tile:
    """The prefill kernel's tile. `block_m` counts (token, head of the group) pairs.

    At least 64 rows of half precision, so that sm_90 compiles to wgmma; 16 or 32 would fall back to the older
    mma.sync.
    """
    padded = next_power_of_2(head_dim)
    if element_size >= 4:
        return _FP32_TILE
    if capability >= (9, 0):
        if padded >= 256:
            # Because 128 rows spill at any number of warps, and so do 64 rows at four; and 64 keys of fp8.
            return Tile(block_m=64, block_n=32 if is_scaled else 64, num_warps=8, num_stages=2)
        # Because 128 keys a step take 253 registers, and spill once ALiBi is added.
        return Tile(block_m=128, block_n=64, num_warps=8, num_stages=3)
    if padded >= 256:
        return Tile(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if padded >= 128 and is_scaled:
        # Because 128 rows spill, with all that a conversion needs.
        return Tile(block_m=64, block_n=64, num_warps=8, num_stages=2)
    if padded >= 128:
        # Because 64 keys a step spill: without wgmma, scores and output share the registers.
        return Tile(block_m=128, block_n=32, num_warps=8, num_stages=2)
    return Tile(block_m=128, block_n=64, num_warps=8, num_stages=2)


def decode_splits(num_programs: int, max_kv_len: int, num_multiprocessors: int) -> int:
    """Into how many splits the longest row's keys are cut: enough programs to fill the device, no more.

    Read from host numbers only, so a captured graph keeps its grid; how many of the splits a row uses, the
    kernel decides from the row's own length. `num_programs` is rows times KV heads before the cut.
    """
    # Four programs of a decode tile fit on a multiprocessor (see decode_tile).
    wanted = (4 * num_multiprocessors) // max(1, num_programs)
    most = -(-max_kv_len // MIN_SPLIT_TOKENS)
    return max(1, min(wanted, most, MAX_SPLITS))


def sampling_splits(num_rows: int, vocab_size: int, block: int, device: torch.device) -> int:
    """Into how many parts each row's vocabulary is cut, so that few rows fill the device too."""
    wanted = (4 * multiprocessors(device)) // max(1, num_rows)
    return max(1, min(wanted, -(-vocab_size // block), MAX_SAMPLING_SPLITS))
