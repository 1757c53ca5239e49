"""The older search for the cuts of top-k and top-p: one program per row, fp64 sums. Kept until both are measured."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tuning import LAUNCHES
from pagemill.kernels.types.sampling_rows import SamplingRows

_CUTS = LAUNCHES["sampling_cuts"]
_DIGIT = tl.constexpr(16)
_NUM_DIGITS = tl.constexpr(8)
_EVERYTHING = tl.constexpr(2**31 - 1)


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
def whole_row_cuts_kernel(
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
    farthest = tl.abs(tl.load(log_min_p_ptr + row))  # of 0 too: -0 is not a distance
    last = tl.minimum(last, farthest.to(tl.int32, bitcast=True))
    tl.store(cuts_ptr + row, last)


def whole_row_cuts(logits: torch.Tensor, peaks: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    cuts = logits.new_empty(num_rows, dtype=torch.int32)
    whole_row_cuts_kernel[(num_rows,)](
        cuts, logits, peaks, rows.temperatures, rows.top_k, rows.top_p, rows.log_min_p, vocab_size, logits.stride(0),
        BLOCK=_CUTS.block, num_warps=_CUTS.num_warps,
    )  # fmt: skip
    return cuts
