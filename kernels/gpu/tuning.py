"""Launch settings of the kernels: a table of tile shapes for attention, one of block sizes for the others.

Never autotuned: a serving process must not time kernels on its first requests, a key lookup costs tens of
microseconds per launch, and a captured graph could not re-tune. The tests compile every entry ahead of time for
the architectures that it names, and reject spills and too much shared memory. On an H200 the decode tile of bf16 was
the best of nine; the other entries are not measured, and rest on the compiler's output (Triton 3.6 and 3.9).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import torch

# Compute capability and multiprocessors assumed without a device: in Triton's interpreter.
_ASSUMED_CAPABILITY = (9, 0)
_ASSUMED_MULTIPROCESSORS = 1

# Below this many tokens a split's launch and merge cost more than they spread.
MIN_SPLIT_TOKENS = 256
# Where all rows together fill the device, only rows longer than this are cut: one program reads about 140 GB/s of an
# H200's 4,400, so a row of 16,384 keys together with 64 of 1,024 took 460 us instead of 67.
LONG_SPLIT_TOKENS = 1024
# Up to this context no row is long enough to justify the merge's launch.
SHORT_CONTEXT_TOKENS = 4096
# Bounds the partial results: 64 * head_dim floats per head and row, 16 where rows are many.
MAX_SPLITS = 64
MAX_LONG_SPLITS = 16
# Parts of a vocabulary that are drawn from side by side.
MAX_SAMPLING_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """A kernel's shape: query rows and keys per step, and how Triton spreads and pipelines them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


ANY = 1 << 30
"""As many as there are."""


@dataclass(frozen=True, slots=True)
class AttentionEntry:
    """The launches a tile is used for. The first entry that covers a launch applies."""

    kernel: Literal["decode", "prefill"]
    architectures: tuple[int, ...]
    """See `tuned_architecture`."""
    numbers: Literal["half", "fp32"]
    """The queries'."""
    is_scaled: bool | None
    """Of the cache, whose tiles then pass through registers on their way. None: either."""
    head_dim: int
    """The largest head_dim, rounded up to a power of two."""
    rows: int
    """Decode: the most query heads per KV head, rounded up to a power of two."""
    tile: Tile


# fp32: products (ieee, no tf32) run on the plain cores with both operands in registers: any larger tile, or one at four
# warps, spills on sm_90 from 128 dims on. fp32 is for comparisons and exactness, not for speed.
# decode, 128 dims: 16 rows over 64 keys take 96 registers and 39 KB on sm_90: five programs to a multiprocessor, enough
# bytes in flight to cover the memory's latency. Of a scaled cache, two stages: three spill where a head's dims must be
# masked.
# decode, 256 dims: converting fp8 spills at three stages; 128 rows spill, and so do 64 at four warps.
# prefill, half: at least 64 rows, so that sm_90 compiles to wgmma; 16 or 32 would fall back to the older mma.sync.
# prefill, sm_90: 128 keys a step take 253 registers, and spill once ALiBi is added. Of 256 dims, 128 rows spill at any
# number of warps, and so do 64 rows at four.
# prefill, sm_80, 128 dims: 64 keys a step spill: without wgmma, scores and output share the registers.
# decode, scaled caches under Triton 3.6: 64 rows spill at four warps on sm_86 and newer, and over 64 keys a step on
# sm_80 at 64 dims, over 32 keys on sm_100 at 256; so do fp32's 32 keys a step at 256 dims on sm_100 and 120.
# prefill, scaled caches: Triton 3.6 takes more registers for a conversion than 3.9. There 128 rows spill on sm_80, 64
# keys a step, and 64 rows at 256; so do 32 keys a step on sm_90 at 256 dims.
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


# Products with weights of few bits (`grouped_matmul`), by rows: (rows of x at most, element size, tile). A step takes a
# chunk of inputs, as the weight was laid out. Sums are held twice, a group's and all: 64 rows by 64 outputs take 255
# registers on sm_80. Few outputs a program where rows are few: as many programs as possible read weights. At least 64
# rows for the rest, so that sm_90 compiles to wgmma. The largest takes 82 KB on sm_80, 89 and 120, 128 KB on sm_90.
MATMUL_TILES = (
    (ANY, 4, Tile(16, 32, 4, 1)),
    (16, 2, Tile(16, 32, 4, 4)),
    (32, 2, Tile(32, 32, 4, 4)),
    (64, 2, Tile(64, 64, 4, 3)),
    (ANY, 2, Tile(128, 64, 8, 3)),
)


# Products of 8-bit numbers with such numbers (`scaled_matmul`), by rows: (rows at most, tile). A step takes 128 inputs.
# Sums take 64 registers a thread in the largest, which needs 96 KB: what sm_86, 89 and 120 have, to the last 3 KB.
SCALED_MATMUL_INPUTS = 128
SCALED_MATMUL_TILES = (
    (16, Tile(16, 32, 4, 4)),
    (32, Tile(32, 32, 4, 4)),
    (64, Tile(64, 64, 4, 3)),
    (ANY, Tile(128, 128, 8, 3)),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The shape of a kernel other than attention: the tile of a program, and its number of warps."""

    block: int
    num_warps: int
    num_stages: int = 3
    """Of loops with products; Triton's own number."""


LAUNCHES = {
    "merge_splits": Launch(16, 4),  # splits
    "reshape_and_cache": Launch(16, 4),  # tokens of a head
    "rotary_cache": Launch(1024, 4),  # numbers of tokens of a head
    "silu_and_mul": Launch(2048, 4),  # columns
    "quantise_rows": Launch(8192, 16),  # numbers of a row, at most
    "copy_blocks": Launch(4096, 4),  # numbers of a block
    "sampling_histogram": Launch(4096, 8),  # logits
    "sampling_band": Launch(1024, 4),  # logits
    # 16 candidates times 512 int64 sums over eight warps are 64 registers a thread.
    "sampling_cuts": Launch(512, 8),  # logits
    "gumbel_argmax": Launch(1024, 4),  # logits
    # At four warps fp32's shrink spills on sm_80 under Triton 3.6; in three stages bf16's expand does.
    "low_rank_shrink": Launch(64, 8),  # inputs
    "low_rank_expand": Launch(64, 4, num_stages=1),  # outputs
    "gated_delta_rule": Launch(32, 4),  # columns of a head's state
    "state_space_scan": Launch(32, 4),  # lines of a head's state
}


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
    """Return the number of programs that run at the same time on the device."""
    if device.type != "cuda":
        return _ASSUMED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def tuned_architecture(capability: tuple[int, int]) -> int:
    """Return the architecture of whose tiles a device gets: 90, or 80 with less shared memory and without wgmma.

    sm_100 has the memory of sm_90. sm_86, sm_89 and sm_120 have 99 KiB a program, which the tiles of 80 keep to.
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
    """The decode kernel's tile for one KV head's `group_size` query heads.

    Rows are the query heads of a group, padded to the 16 that a tensor-core product takes. A group larger than
    `block_m` is cut into several programs; each of them reads the keys again, from the L2 cache if all is well.
    `element_size` is the queries'.
    """
    return _tile("decode", capability, element_size, is_scaled, head_dim, group_size)


def prefill_tile(
    head_dim: int, element_size: int, capability: tuple[int, int], *, is_scaled: bool = False
) -> Tile:
    """The prefill kernel's tile. `block_m` counts (token, head of the group) pairs."""
    return _tile("prefill", capability, element_size, is_scaled, head_dim, 1)


def matmul_tile(num_rows: int, element_size: int) -> Tile:
    """The tile of `grouped_matmul`: `block_m` rows of x by `block_n` outputs."""
    return next(tile for most, size, tile in MATMUL_TILES if size == element_size and num_rows <= most)


def scaled_matmul_tile(num_rows: int) -> Tile:
    """The tile of `scaled_matmul`: `block_m` rows by `block_n` outputs."""
    return next(tile for most, tile in SCALED_MATMUL_TILES if num_rows <= most)


class Splits(NamedTuple):
    """How rows' keys are cut."""

    most: int
    """The most parts."""
    min_tokens: int
    """The fewest keys of a part; a multiple of every decode tile's `block_n`."""


def decode_splits(num_programs: int, max_kv_len: int, num_multiprocessors: int) -> Splits:
    """Return enough splits to fill the device, and to keep one long row from taking longer than all others.

    Read from host numbers only, so a captured graph keeps its grid; how many of the splits a row uses, the
    kernel decides from the row's own length. `num_programs` is rows times KV heads before the cut.
    """
    # Four programs of a decode tile fit on a multiprocessor (see ATTENTION_TILES).
    wanted = max(1, (4 * num_multiprocessors) // max(1, num_programs))
    filling = min(wanted, -(-max_kv_len // MIN_SPLIT_TOKENS), MAX_SPLITS)
    is_long = max_kv_len > SHORT_CONTEXT_TOKENS
    long = min(-(-max_kv_len // LONG_SPLIT_TOKENS), MAX_LONG_SPLITS) if is_long else 1
    least = -(-LONG_SPLIT_TOKENS // wanted // MIN_SPLIT_TOKENS) * MIN_SPLIT_TOKENS
    return Splits(max(1, filling, long), max(MIN_SPLIT_TOKENS, least))


def sampling_splits(num_rows: int, vocab_size: int, block: int, most: int, device: torch.device) -> int:
    """Into how many parts each row's vocabulary is cut, up to `most`, so that few rows fill the device too."""
    wanted = (4 * multiprocessors(device)) // max(1, num_rows)
    return max(1, min(wanted, -(-vocab_size // block), most))
