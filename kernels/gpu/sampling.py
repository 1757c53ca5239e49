"""Tokens drawn from logits without a sort, on the device.

The logits that top-k and top-p keep are those within some distance of the row's best one. Distances are numbers
from 0 on, and such fp32 numbers are ordered as their bits are: the cut is found digit by digit, sixteen candidates
a pass (a radix search, where a sort would move the whole row). Argmax of logits plus counter-based Gumbel noise
(`pagemill.kernels.noise`) then is a draw from what is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tuning import LAUNCHES, MAX_SAMPLING_SPLITS, sampling_splits
from pagemill.kernels.types.sampling_rows import SamplingRows

# Vocabulary entries a program looks at together. 16 candidates times 512 fp64 sums over eight warps are 64
# registers a thread.
_CUTS = LAUNCHES["sampling_cuts"]
_DRAW = LAUNCHES["gumbel_argmax"]
_DIGIT = tl.constexpr(16)
_NUM_DIGITS = tl.constexpr(8)  # four bits each, 31 in all: a distance has no sign
_EVERYTHING = tl.constexpr(2**31 - 1)
# Finaliser constants of MurmurHash3 and the golden ratio, as in pagemill.kernels.noise.
_MIX_1 = tl.constexpr(0x85EBCA6B)
_MIX_2 = tl.constexpr(0xC2B2AE35)
_GOLDEN = tl.constexpr(0x9E3779B9)


@triton.jit
def _mix(x):
    """MurmurHash3's 32-bit finaliser on uint32."""
    x ^= x >> 16
    x *= tl.full([], _MIX_1, tl.uint32)
    x ^= x >> 13
    x *= tl.full([], _MIX_2, tl.uint32)
    x ^= x >> 16
    return x


@triton.jit
def _chain(key, word):
    mixed = (key ^ word.to(tl.uint32)) * tl.full([], 5, tl.uint32) + tl.full([], _GOLDEN, tl.uint32)
    return _mix(mixed)


@triton.jit
def _gumbel(key, token_ids):
    """Standard Gumbel noise of `pagemill.kernels.noise.gumbel_noise` for a tile of tokens."""
    hashed = _mix(token_ids.to(tl.uint32) * tl.full([], _GOLDEN, tl.uint32) ^ key)
    bits = (_mix(hashed + key) & tl.full([], 0x7FFFFFFF, tl.uint32)).to(tl.int32)
    uniform = (bits.to(tl.float32) + 0.5) * (2.0**-31)
    uniform = tl.minimum(uniform, 1.0 - 2.0**-24)
    # log1p(-u) by way of log (Kahan): w is 1 - u as rounded, and the quotient makes good what rounding lost.
    w = 1.0 - uniform
    exact = tl.where(w == 1.0, 1.0, 1.0 - w)
    exponential = tl.where(w == 1.0, uniform, -tl.log(w) * (uniform / exact))
    return -tl.log(exponential)


@triton.jit
def _distances(logits_ptr, columns, is_column, peak, temperature):
    """Return the distance below the row's best logit, in units of the temperature: torch's division, bit for bit."""
    logits = tl.load(logits_ptr + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    return tl.div_rn(peak - logits, temperature)


@triton.jit
def _kept_weight(
    logits_ptr, peak, temperature, vocab_size, bounds, last, WEIGH: tl.constexpr, BLOCK: tl.constexpr
):
    """[_DIGIT] fp64: what lies within each of the `bounds`, and within `last`: how many, or their weight.

    Threads sum their own columns and meet once: a reduction in the loop would be a third of its instructions.
    """
    sums = tl.zeros([_DIGIT, BLOCK], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_column = columns < vocab_size
        distances = _distances(logits_ptr, columns, is_column, peak, temperature)
        bits = distances.to(tl.int32, bitcast=True)
        if WEIGH:
            weights = tl.exp(-distances).to(tl.float64)
        else:
            weights = tl.full([BLOCK], 1.0, tl.float64)
        weights = tl.where(
            is_column & (distances >= 0.0) & (bits <= last), weights, 0.0
        )  # NaN weighs nothing
        sums += tl.where(bits[None, :] <= bounds[:, None], weights[None, :], 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _smallest_cut(
    logits_ptr, peak, temperature, vocab_size, wanted, last, WEIGH: tl.constexpr, BLOCK: tl.constexpr
):
    """Bits of the smallest distance within which at least `wanted` lies; `last` if that is too much to ask."""
    digits = tl.arange(0, _DIGIT)
    cut = tl.zeros([], tl.int32)
    for number in range(_NUM_DIGITS):
        shift = tl.maximum(27 - 4 * number, 0)
        bounds = cut + (digits << shift) + ((1 << shift) - 1)
        sums = _kept_weight(logits_ptr, peak, temperature, vocab_size, bounds, last, WEIGH, BLOCK)
        digit = tl.minimum(tl.sum((sums < wanted).to(tl.int32), 0), _DIGIT - 1)
        cut += digit << shift
    return tl.minimum(cut, last)


@triton.jit
def sampling_cuts_kernel(
    cuts_ptr,  # [num_rows] int32: bits of the largest distance from the best logit that may be drawn
    logits_ptr,  # [num_rows, vocab_size] fp32
    peaks_ptr,  # [num_rows] fp32, each row's largest logit
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    vocab_size,
    stride_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_row
    peak, temperature = tl.load(peaks_ptr + row), tl.load(temperatures_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    last = tl.full([], _EVERYTHING, tl.int32)
    if (top_k > 0) & (top_k < vocab_size):
        last = _smallest_cut(
            logits_ptr, peak, temperature, vocab_size, top_k.to(tl.float64), last, False, BLOCK
        )
    if top_p < 1.0:
        everywhere = tl.full([_DIGIT], _EVERYTHING, tl.int32)
        sums = _kept_weight(logits_ptr, peak, temperature, vocab_size, everywhere, last, True, BLOCK)
        wanted = top_p * tl.max(sums, 0)
        last = _smallest_cut(logits_ptr, peak, temperature, vocab_size, wanted, last, True, BLOCK)
    farthest = tl.abs(tl.load(log_min_p_ptr + row))  # of 0 too: -0 is no distance
    last = tl.minimum(last, farthest.to(tl.int32, bitcast=True))
    tl.store(cuts_ptr + row, last)


@triton.jit
def gumbel_argmax_kernel(
    best_ptr,  # [num_rows, num_splits] fp32: each split's highest sum of logit and noise
    ids_ptr,  # [num_rows, num_splits] int64: its token
    logits_ptr,  # [num_rows, vocab_size] fp32
    peaks_ptr,  # [num_rows] fp32
    cuts_ptr,  # [num_rows] int32, or None: everything may be drawn
    temperatures_ptr,
    seeds_ptr,
    sample_indices_ptr,
    positions_ptr,
    vocab_size,
    split_size,
    stride_row,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * stride_row
    peak, temperature = tl.load(peaks_ptr + row), tl.load(temperatures_ptr + row)
    cut = tl.full([], _EVERYTHING, tl.int32)
    if cuts_ptr is not None:
        cut = tl.load(cuts_ptr + row)
    seed = tl.load(seeds_ptr + row)
    key = _mix(seed.to(tl.uint32) + tl.full([], _GOLDEN, tl.uint32))
    key = _chain(key, seed >> 32)
    key = _chain(key, tl.load(sample_indices_ptr + row))
    key = _chain(key, tl.load(positions_ptr + row))

    begin = split * split_size
    end = tl.minimum(begin + split_size, vocab_size)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.zeros([], tl.int32) + begin
    for start in range(begin, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_column = columns < end
        distances = _distances(logits_ptr, columns, is_column, peak, temperature)
        keeps = is_column & (distances >= 0.0) & (distances.to(tl.int32, bitcast=True) <= cut)
        sums = tl.where(keeps, _gumbel(key, columns) - distances, float("-inf"))
        tile_best, tile_id = tl.max(sums, 0, return_indices=True)
        best_id = tl.where(tile_best > best, start + tile_id, best_id)  # of equals the lowest id
        best = tl.maximum(best, tile_best)
    split_at = row * tl.num_programs(1) + split
    tl.store(best_ptr + split_at, best)
    tl.store(ids_ptr + split_at, best_id.to(tl.int64))


def sample_tokens(
    logits: torch.Tensor, peaks: torch.Tensor, rows: SamplingRows, *, has_filters: bool
) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.sample_tokens`."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return logits.new_empty(0, dtype=torch.int64)
    cuts = None
    if has_filters:
        cuts = logits.new_empty(num_rows, dtype=torch.int32)
        sampling_cuts_kernel[(num_rows,)](
            cuts,
            logits,
            peaks,
            rows.temperatures,
            rows.top_k,
            rows.top_p,
            rows.log_min_p,
            vocab_size,
            logits.stride(0),
            BLOCK=_CUTS.block,
            num_warps=_CUTS.num_warps,
        )
    num_splits = sampling_splits(num_rows, vocab_size, _DRAW.block, logits.device)
    assert num_splits <= MAX_SAMPLING_SPLITS
    best = logits.new_empty((num_rows, num_splits))
    ids = logits.new_empty((num_rows, num_splits), dtype=torch.int64)
    gumbel_argmax_kernel[(num_rows, num_splits)](
        best,
        ids,
        logits,
        peaks,
        cuts,
        rows.temperatures,
        rows.seeds,
        rows.sample_indices,
        rows.positions,
        vocab_size,
        triton.cdiv(triton.cdiv(vocab_size, num_splits), _DRAW.block) * _DRAW.block,
        logits.stride(0),
        BLOCK=_DRAW.block,
        num_warps=_DRAW.num_warps,
    )
    return ids.gather(1, best.argmax(dim=1, keepdim=True))[:, 0]
