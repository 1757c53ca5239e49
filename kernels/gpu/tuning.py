"""Launch settings of the kernels: tile shapes for attention, block sizes for the others.

Never autotuned: a serving process must not time kernels on its first requests, a key lookup costs tens of
microseconds per launch, and a captured graph could not re-tune. The tests compile every entry ahead of time
for its architectures, and reject spills and excessive shared memory. On an H200 the decode tile of bf16 was
the best of nine. The other entries are not measured, and are based on the compiler's output (Triton 3.6 and
3.9).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch

# Compute capability and multiprocessors assumed without a device: in Triton's interpreter.
_ASSUMED_CAPABILITY = (9, 0)
_ASSUMED_MULTIPROCESSORS = 1

# With fewer tokens, a split's launch and merge cost more than the split saves.
MIN_SPLIT_TOKENS = 256
# If all rows together fill the device, only rows longer than this are split. One program reads about 140 GB/s
# of an H200's 4,400, so a row of 16,384 keys together with 64 of 1,024 took 460 us instead of 67.
LONG_SPLIT_TOKENS = 1024
# With shorter contexts, no row is long enough to justify the merge's launch.
SHORT_CONTEXT_TOKENS = 4096
# Limits the partial results: 64 * head_dim floats per head and row, 16 with many rows.
MAX_SPLITS = 64
MAX_LONG_SPLITS = 16
# Parts of the inputs of an adapter's first matmul. The second one adds their sums.
MIN_LOW_RANK_INPUTS = 256
MAX_LOW_RANK_SPLITS = 16
# Parts of a vocabulary that are sampled in parallel.
MAX_SAMPLING_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """A kernel's shape: query rows and keys per step, and Triton's numbers of warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


ANY = 1 << 30
"""No limit."""


@dataclass(frozen=True, slots=True)
class AttentionEntry:
    """The launches that use a tile. The first matching entry applies."""

    kernel: Literal["decode", "prefill"]
    architectures: tuple[int, ...]
    """See `tuned_architecture`."""
    numbers: Literal["half", "fp32"]
    """The dtype of the queries."""
    is_scaled: bool | None
    """True for a scaled cache, whose tiles pass through registers first. None: either."""
    head_dim: int
    """The largest head_dim, rounded up to a power of two."""
    rows: int
    """Decode: the most query heads per KV head, rounded up to a power of two."""
    tile: Tile


# fp32: matmuls (ieee, no tf32) run on the CUDA cores with both operands in registers. Any larger tile, or one with
# four warps, spills on sm_90 from 128 dims. fp32 is for comparisons and exactness, not for speed.
# decode, 128 dims: 16 rows over 64 keys use 96 registers and 39 KB on sm_90. Five programs fit on a multiprocessor,
# enough bytes in flight to hide the memory latency. A scaled cache has two stages: three spill if a head's dims must
# be masked.
# decode, 256 dims: converting fp8 spills with three stages; 128 rows spill, and so do 64 with four warps.
# prefill, half: at least 64 rows, so that sm_90 compiles to wgmma; 16 or 32 would fall back to the older mma.sync.
# prefill, sm_90: 128 keys per step use 253 registers, and spill with ALiBi. At 256 dims, 128 rows spill with any
# number of warps, and so do 64 rows with four.
# prefill, sm_80, 128 dims: 64 keys per step spill: without wgmma, scores and output share the registers.
# decode, scaled caches with Triton 3.6: 64 rows spill with four warps on sm_86 and newer, and over 64 keys per step
# on sm_80 at 64 dims, over 32 keys on sm_100 at 256; so do fp32's 32 keys per step at 256 dims on sm_100 and 120.
# prefill, scaled caches: Triton 3.6 uses more registers for a conversion than 3.9. There 128 rows spill on sm_80 with
# 64 keys per step, and 64 rows at 256; so do 32 keys per step on sm_90 at 256 dims.
ATTENTION_TILES = (
    # kernel, sm, numbers, is_scaled, head_dim, rows; rows and keys of a tile, warps, stages
    AttentionEntry("decode", (80, 90), "fp32", None, 128, ANY, Tile(16, 32, 8, 1)),
    AttentionEntry("decode", (80, 90), "fp32", None, ANY, ANY, Tile(16, 16, 8, 1)),
    AttentionEntry("decode", (80, 90), "half", False, 128, 16, Tile(16, 64, 4, 3)),
    AttentionEntry("decode", (80, 90), "half", True, 128, 16, Tile(16, 64, 4, 2)),
    AttentionEntry("decode", (80, 90), "half", False, 128, 32, Tile(32, 64, 4, 3)),
    AttentionEntry("decode", (80, 90), "half", True, 128, 32, Tile(32, 64, 4, 2)),
    AttentionEntry("decode", (80, 90), "half", False, 128, 64, Tile(64, 64, 4, 2)),
    AttentionEntry("decode", (80, 90), "half", False, 128, ANY, Tile(128, 64, 8, 2)),
    AttentionEntry("decode", (80, 90), "half", True, 128, ANY, Tile(64, 32, 8, 2)),
    AttentionEntry("decode", (80, 90), "half", False, ANY, 16, Tile(16, 32, 4, 3)),
    AttentionEntry("decode", (80, 90), "half", True, ANY, 16, Tile(16, 32, 4, 2)),
    AttentionEntry("decode", (80, 90), "half", False, ANY, 32, Tile(32, 32, 4, 3)),
    AttentionEntry("decode", (80, 90), "half", True, ANY, 32, Tile(32, 32, 4, 2)),
    AttentionEntry("decode", (80, 90), "half", False, ANY, ANY, Tile(64, 32, 8, 2)),
    AttentionEntry("decode", (80, 90), "half", True, ANY, ANY, Tile(64, 16, 8, 2)),
    AttentionEntry("prefill", (80, 90), "fp32", None, ANY, ANY, Tile(16, 32, 8, 1)),
    AttentionEntry("prefill", (90,), "half", None, 128, ANY, Tile(128, 64, 8, 3)),
    AttentionEntry("prefill", (90,), "half", False, ANY, ANY, Tile(64, 64, 8, 2)),
    AttentionEntry("prefill", (90,), "half", True, ANY, ANY, Tile(64, 16, 8, 2)),
    AttentionEntry("prefill", (80,), "half", False, 64, ANY, Tile(128, 64, 8, 2)),
    AttentionEntry("prefill", (80,), "half", False, 128, ANY, Tile(128, 32, 8, 2)),
    AttentionEntry("prefill", (80,), "half", True, 128, ANY, Tile(64, 32, 8, 2)),
    AttentionEntry("prefill", (80,), "half", False, ANY, ANY, Tile(64, 32, 8, 2)),
    AttentionEntry("prefill", (80,), "half", True, ANY, ANY, Tile(32, 32, 8, 2)),
)


# Matmuls with weights of few bits (`grouped_matmul`), by rows: (maximum rows of x, element size, tile). A
# step processes a chunk of inputs, in the layout of the weight. Sums are stored twice, a group's and the
# total: 64 rows by 64 outputs use 255 registers on sm_80. With few rows, a program has few outputs, so that
# as many programs as possible read weights. Larger tiles have at least 64 rows, so that sm_90 compiles to
# wgmma. The largest needs 82 KB on sm_80, 89 and 120, 128 KB on sm_90.
MATMUL_TILES = (
    (ANY, 4, Tile(16, 32, 4, 1)),
    (16, 2, Tile(16, 32, 4, 4)),
    (32, 2, Tile(32, 32, 4, 4)),
    (64, 2, Tile(64, 64, 4, 3)),
    (ANY, 2, Tile(128, 64, 8, 3)),
)


# With more rows, the weight is dequantized once, for the library's matmul. Estimated for an H200: at 256 rows and
# 4,096 inputs and outputs, both take about 30 us, of which 15 are the copy's.
MOST_UNWIDENED_ROWS = 256


# Matmuls of 8-bit rows and weights (`scaled_matmul`), by rows: (maximum rows, tile). A step processes 128
# inputs. The largest tile's sums use 64 registers per thread. It needs 96 KB, which sm_86, 89 and 120 have,
# to the last 3 KB.
SCALED_MATMUL_INPUTS = 128
SCALED_MATMUL_TILES = (
    (16, Tile(16, 32, 4, 4)),
    (32, Tile(32, 32, 4, 4)),
    (64, Tile(64, 64, 4, 3)),
    (ANY, Tile(128, 128, 8, 3)),
)


# Matmuls of rows sorted by expert (`expert_matmul`), by an expert's mean number of rows: (maximum mean, element
# size, tile). A step processes 64 inputs, a cache line of 16-bit values. With few rows, several programs per
# multiprocessor read weights; the larger tile needs 96 KB. There are only two tiles, so that a startup's largest
# step and its smallest compile both. fp32 spills on sm_90 with four warps.
EXPERT_MATMUL_INPUTS = 64
EXPERT_MATMUL_TILES = (
    (ANY, 4, Tile(16, 32, 8, 1)),
    (32, 2, Tile(32, 64, 4, 4)),
    (ANY, 2, Tile(128, 128, 8, 3)),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The shape of a kernel other than attention: the tile of a program, and its number of warps."""

    block: int
    num_warps: int
    num_stages: int = 3
    """Stages of loops with matmuls; the default is Triton's."""


LAUNCHES = {
    "merge_splits": Launch(16, 4),  # splits
    "reshape_and_cache": Launch(16, 4),  # tokens of a head
    "rotary_cache": Launch(1024, 4),  # values of a head, over all tokens
    "silu_and_mul": Launch(2048, 4),  # columns
    "quantize_rows": Launch(8192, 16),  # values of a row, at most
    "copy_blocks": Launch(4096, 4),  # values of a block
    "sampling_histogram": Launch(4096, 8),  # logits
    "sampling_band": Launch(1024, 4),  # logits
    # 16 candidates times 512 int64 sums over eight warps are 64 registers per thread.
    "sampling_cuts": Launch(512, 8),  # logits
    "gumbel_argmax": Launch(1024, 4),  # logits
    # With three stages, bf16's expand spills with Triton 3.6. With 64 inputs, shrink reads 8 bytes at a time.
    "low_rank_shrink": Launch(128, 8),  # inputs
    "low_rank_expand": Launch(64, 4, num_stages=1),  # outputs
    "expert_places": Launch(4096, 8),  # choices
    "expert_rows": Launch(1024, 4),  # columns
    "widen": Launch(4096, 4),  # values of a weight
    "gated_delta_rule": Launch(32, 4),  # columns of a head's state
    "state_space_scan": Launch(32, 4),  # lines of a head's state
}


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`, for n >= 1."""
    return 1 << (n - 1).bit_length()


def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile of heads: a power of two, and at least 16, the depth of a tensor-core matmul."""
    return max(16, next_power_of_2(head_dim))


def row_warps(size: int) -> int:
    """Warps of a program that holds a complete row of `size` values: 16 values per thread, up to 16 warps."""
    return max(1, min(16, next_power_of_2(size) // 512))


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the device's compute capability, or the newest tuned one for interpreted kernels."""
    if device.type != "cuda":
        return _ASSUMED_CAPABILITY
    return torch.cuda.get_device_capability(device)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of programs that run at the same time on the device."""
    if device.type != "cuda":
        return _ASSUMED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def tuned_architecture(capability: tuple[int, int]) -> int:
    """Return the architecture whose tiles a device uses: 90, or 80 with less shared memory and without wgmma.

    sm_100 has the memory of sm_90. sm_86, sm_89 and sm_120 have 99 KiB per program, which is enough for the
    tiles of 80.
    """
    return 90 if (9, 0) <= capability < (12, 0) else 80


@cache
def _tile(
    kernel: str, capability: tuple[int, int], element_size: int, is_scaled: bool, head_dim: int, rows: int
) -> Tile:
    architecture = tuned_architecture(capability)
    numbers = "fp32" if element_size >= 4 else "half"
    for entry in ATTENTION_TILES:
        if (
            entry.kernel == kernel
            and architecture in entry.architectures
            and entry.numbers == numbers
            and entry.is_scaled in (None, is_scaled)
            and next_power_of_2(head_dim) <= entry.head_dim
            and next_power_of_2(rows) <= entry.rows
        ):
            return entry.tile
    raise AssertionError(
        f"no tile for {kernel} of {numbers}, {head_dim} dims, {rows} rows on sm_{architecture}"
    )


def decode_tile(
    head_dim: int,
    group_size: int,
    element_size: int,
    capability: tuple[int, int],
    *,
    is_scaled: bool = False,
) -> Tile:
    """Return the decode kernel's tile for one KV head's `group_size` query heads.

    Rows are the query heads of a group, padded to the 16 rows of a tensor-core matmul. A group larger than
    `block_m` is divided among several programs. Each of them reads the keys again, normally from the L2
    cache. `element_size` is that of the queries.
    """
    return _tile("decode", capability, element_size, is_scaled, head_dim, group_size)


def prefill_tile(
    head_dim: int, element_size: int, capability: tuple[int, int], *, is_scaled: bool = False
) -> Tile:
    """Return the prefill kernel's tile. `block_m` counts (token, head of the group) pairs."""
    return _tile("prefill", capability, element_size, is_scaled, head_dim, 1)


def matmul_tile(num_rows: int, element_size: int) -> Tile:
    """Return the tile of `grouped_matmul`: `block_m` rows of x by `block_n` outputs."""
    return next(tile for most, size, tile in MATMUL_TILES if size == element_size and num_rows <= most)


def scaled_matmul_tile(num_rows: int) -> Tile:
    """Return the tile of `scaled_matmul`: `block_m` rows by `block_n` outputs."""
    return next(tile for most, tile in SCALED_MATMUL_TILES if num_rows <= most)


def expert_matmul_tile(mean_rows: int, element_size: int) -> Tile:
    """Return the tile of `expert_matmul`: `block_m` rows by `block_n` outputs."""
    tiles = (tile for most, size, tile in EXPERT_MATMUL_TILES if size == element_size and mean_rows <= most)
    return next(tiles)


class Splits(NamedTuple):
    """How to split the keys of rows."""

    most: int
    """Maximum number of parts."""
    min_tokens: int
    """Minimum number of keys in a part; a multiple of every decode tile's `block_n`."""


def decode_splits(num_programs: int, max_kv_len: int, num_multiprocessors: int) -> Splits:
    """Return enough splits to fill the device, and to prevent one long row from taking longer than all others.

    Uses only host values, so a captured graph keeps its grid. The kernel computes the number of splits of a
    row from the row's length. `num_programs` is rows times KV heads before the split.
    """
    # Four programs of a decode tile fit on a multiprocessor (see ATTENTION_TILES).
    wanted = max(1, (4 * num_multiprocessors) // max(1, num_programs))
    filling = min(wanted, -(-max_kv_len // MIN_SPLIT_TOKENS), MAX_SPLITS)
    is_long = max_kv_len > SHORT_CONTEXT_TOKENS
    long = min(-(-max_kv_len // LONG_SPLIT_TOKENS), MAX_LONG_SPLITS) if is_long else 1
    least = -(-LONG_SPLIT_TOKENS // wanted // MIN_SPLIT_TOKENS) * MIN_SPLIT_TOKENS
    return Splits(max(1, filling, long), max(MIN_SPLIT_TOKENS, least))


def sampling_splits(num_rows: int, vocab_size: int, block: int, most: int, device: torch.device) -> int:
    """Return the number of parts of each row's vocabulary, up to `most`, so that few rows also fill the device."""
    wanted = (4 * multiprocessors(device)) // max(1, num_rows)
    return max(1, min(wanted, -(-vocab_size // block), most))


def low_rank_splits(num_programs: int, in_features: int, device: torch.device) -> tuple[int, int]:
    """Return how to split the inputs of adapters' first matmul: the number of parts, and the inputs of each.

    `num_programs` is the number before the split. A part consists of whole steps of the kernel's loop.
    """
    wanted = min((4 * multiprocessors(device)) // max(1, num_programs), MAX_LOW_RANK_SPLITS)
    step = LAUNCHES["low_rank_shrink"].block
    least = max(MIN_LOW_RANK_INPUTS, -(-in_features // max(1, wanted)))
    inputs = -(-least // step) * step
    return -(-in_features // inputs), inputs
