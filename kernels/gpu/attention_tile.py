"""Operations of the attention kernels on one tile of keys and values: locate, load, score and accumulate.

Decode and prefill share them, so that scores are computed identically. Softmax uses base 2: `exp2` is the
native exponential of the hardware, and the factor log2(e) is part of the scale of the scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.types.layer_cache import LayerCache

# With TRITON_INTERPRET=1 kernels run as numpy code on CPU tensors. There bfloat16 is only a storage type:
# matmuls of two bf16 tiles silently return garbage. Kernels therefore have UPCAST, and compute in fp32 if it
# is set.
INTERPRETED = bool(triton.knobs.runtime.interpret)

_CONVERTS_FP8_DIRECTLY = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))
"""Triton 3.6 converts fp8 to bf16 with an instruction that sm_89 does not have."""
_LOG2_E = tl.constexpr(1.4426950408889634)
# A running maximum starts here and not at -inf: a tile without visible keys then gives exp2(-inf - finite) =
# 0, whereas -inf minus -inf would give NaN.
LOWEST_SCORE = tl.constexpr(-1.0e30)

# Over a scaled cache, queries of half precision are multiplied in fp16, whether they are fp16 or bf16. int8
# and e4m3 are exact in fp16. e4m3 has an instruction that converts two values; bf16 needs one more for each,
# at an eighth of the rate. Values that could exceed the range of fp16 are first divided by the largest, then
# multiplied by this: 2^15 down to fp16's smallest, 2^-24, is a range of 39 bits.
_HALF_PEAK = tl.constexpr(2.0**15)
# No larger than any scale of values (`SMALLEST_PEAK` over the largest value), and dividing by it never
# overflows.
SMALLEST_UNIT = tl.constexpr(1.0e-33)


def must_upcast(query: torch.Tensor, cache: LayerCache) -> bool:
    """Return True if a kernel must convert queries, keys and values to fp32 before it computes."""
    return INTERPRETED and torch.bfloat16 in (query.dtype, cache.keys.dtype)


@triton.jit
def first_visible(WINDOW: tl.constexpr, position):
    """`first_visible` of `types/window.py`, which the interpreter does not support because its file has no Triton."""
    return position + 1 - WINDOW if WINDOW > 0 else position // -WINDOW * -WINDOW


@triton.jit
def to_half(query):
    """(fp16 rows whose largest value is `_HALF_PEAK`, factors for their scores [BLOCK_M])."""
    wide = query.to(tl.float32)
    factors = tl.maximum(tl.max(tl.abs(wide), 1), 1.0e-30) / _HALF_PEAK
    return (wide * (1.0 / factors)[:, None]).to(tl.float16), factors


@triton.jit
def slot_offsets(
    block_table_ptr,  # the row's table
    tile_start,  # a multiple of BLOCK_N
    visible,  # [BLOCK_N] positions that can be read
    stride_block,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Offsets [BLOCK_N] of a tile's slots in the cache, int64, without the head's offset.

    If BLOCK_N divides BLOCK_SIZE, one table entry serves the complete tile. Other tiles can span blocks, so
    each position is looked up. Table entries of invisible positions are never read, because they can be
    undefined.
    """
    lanes = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(block_table_ptr + tile_start // BLOCK_SIZE).to(tl.int64)
        return block * stride_block + (tile_start % BLOCK_SIZE + lanes) * HEAD_DIM
    positions = tile_start + lanes
    if MASKED:
        blocks = tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
    else:
        blocks = tl.load(block_table_ptr + positions // BLOCK_SIZE).to(tl.int64)
    return blocks * stride_block + (positions % BLOCK_SIZE) * HEAD_DIM


@triton.jit
def load_slots(
    cache_ptr,  # the head's first slot in block 0
    offsets,  # [BLOCK_N]
    visible,  # [BLOCK_N]
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile [BLOCK_N, HEAD_DIM_PADDED] of keys or values as stored; zeros for invisible positions.

    The zeros matter: a masked key's probability is 0, and 0 times the NaN of an unused slot would be NaN.
    """
    dims = tl.arange(0, HEAD_DIM_PADDED)
    pointers = cache_ptr + offsets[:, None] + dims[None, :]
    if MASKED and HEAD_DIM == HEAD_DIM_PADDED:
        tile = tl.load(pointers, mask=visible[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=visible[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == HEAD_DIM_PADDED:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def load_scales(
    scales_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE]
    kv_head,
    offsets,  # [BLOCK_N] of the slots in the cache, without the head's offset
    visible,  # [BLOCK_N]
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The scales [BLOCK_N] of a tile's slots; every HEAD_DIM values of the cache share one."""
    pointers = scales_ptr + kv_head.to(tl.int64) * BLOCK_SIZE + offsets // HEAD_DIM
    if MASKED:
        return tl.load(pointers, mask=visible, other=0.0)
    return tl.load(pointers)


@triton.jit
def converted(tile, COMPUTE: tl.constexpr):
    """Convert a tile of keys or values to the dtype of the matmuls."""
    if tile.dtype == tl.int8 and tl.float16 == COMPUTE:
        # 0x6480 are the bits of 1152, where the last place counts ones; adding is four times as fast as
        # converting.
        return (tile.to(tl.int16) + 0x6480).to(tl.float16, bitcast=True) - 1152.0
    elif tile.dtype == tl.float8e4nv and tl.bfloat16 == COMPUTE and not _CONVERTS_FP8_DIRECTLY:
        return tile.to(tl.float32).to(COMPUTE)
    else:
        return tile.to(COMPUTE)


@triton.jit
def attention_scores(
    query,  # [BLOCK_M, HEAD_DIM_PADDED]
    keys,  # [BLOCK_N, HEAD_DIM_PADDED], as stored
    key_scales,  # [BLOCK_N]; unused unless SCALED
    distances,  # [BLOCK_M, BLOCK_N] or [1, BLOCK_N] key position minus query position
    slopes,  # [BLOCK_M] ALiBi slope of each row's head; unused without ALiBi
    scale,  # a number, or [BLOCK_M, 1]
    SCALED: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0 = none
):
    """Scores [BLOCK_M, BLOCK_N] in base 2, fp32, unmasked."""
    # "ieee" affects only fp32 inputs: the default would round them to tf32.
    scores = tl.dot(query, tl.trans(converted(keys, query.dtype)), input_precision="ieee")
    if SCALED:
        scores = scores * key_scales[None, :]
    if SOFTCAP > 0:
        # tanh(x) = 2 sigmoid(2x) - 1; libdevice's tanh does not exist in the interpreter.
        capped = 2.0 * tl.sigmoid(scores * (scale * (2.0 / SOFTCAP))) - 1.0
        scores = capped * (SOFTCAP * _LOG2_E)
    else:
        scores = scores * (scale * _LOG2_E)
    if HAS_ALIBI:
        # slope * key position, minus a constant of the row that softmax cancels. Near the query, where most
        # of the weight is, values stay small and exact.
        scores += (slopes * _LOG2_E)[:, None] * distances.to(tl.float32)
    return scores


@triton.jit
def with_sinks(
    total,  # sums of exp2(score - maximum)
    maximum,  # of the same shape
    sinks_ptr,  # [num_heads] fp32
    heads,  # of the same shape
    is_head,
):
    """Add the weights of the heads' sinks, up to 2 ** 126, to `total`.

    At the limit, values already round to nothing.
    """
    sinks = tl.load(sinks_ptr + heads, mask=is_head, other=float("-inf"))
    return total + tl.exp2(tl.minimum(sinks * _LOG2_E - maximum, 126.0))


@triton.jit
def fold_tile(
    maximum,  # [BLOCK_M] running maximum of the scores
    total,  # [BLOCK_M] running sum of exp2(score - maximum)
    output,  # [BLOCK_M, HEAD_DIM_PADDED] running sum of the weighted values
    unit,  # [1] factor that `output` must be multiplied by if HALF; starts at SMALLEST_UNIT
    scores,  # [BLOCK_M, BLOCK_N]; -inf where a key is not visible
    values,  # [BLOCK_N, HEAD_DIM_PADDED], as stored
    value_scales,  # [BLOCK_N]; unused unless SCALED
    COMPUTE: tl.constexpr,  # the dtype of the queries
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
):
    """One step of the softmax recurrence: (maximum, total, output, unit) after this tile."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    shrink = tl.exp2(maximum - new_maximum)
    total = total * shrink + tl.sum(weights, 1)
    if HALF:
        # The largest scale so far is the unit, so that no weight times a scale leaves fp16's range.
        new_unit = tl.maximum(unit, tl.max(value_scales, 0) / _HALF_PEAK)
        shrink = shrink * (unit / new_unit)
        unit = new_unit
        value_scales = value_scales * (1.0 / unit)
    if SCALED:
        weights = weights * value_scales[None, :]
    output = tl.dot(
        weights.to(COMPUTE), converted(values, COMPUTE), output * shrink[:, None], input_precision="ieee"
    )
    return new_maximum, total, output, unit
