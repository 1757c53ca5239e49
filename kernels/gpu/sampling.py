"""Draw tokens from logits without a sort, on the device.

Top-k and top-p keep the logits within some distance of the row's best one. The cut is found in three steps. A
histogram counts each row's distances. If the cut is in a bin of moderate size, a second pass copies the
logits of that bin and its neighbors (the band) and sums the weights around it. The last kernel searches the
band, or the complete row if no band contains the cut. Distances are not negative, so their fp32 bits sort
like the values. The kernel therefore finds the cut digit by digit, sixteen candidates per pass (a radix
search).

Counts are integers, and weights are in fixed point. A sum therefore depends neither on its order nor on the
number of programs that share a row. The argmax of logits plus counter-based Gumbel noise
(`pagemill.kernels.noise`) is then a draw from the remaining tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tuning import LAUNCHES, MAX_SAMPLING_SPLITS, sampling_splits
from pagemill.kernels.types.sampling_rows import SamplingRows

_HISTOGRAM = LAUNCHES["sampling_histogram"]
_BAND = LAUNCHES["sampling_band"]
_CUTS = LAUNCHES["sampling_cuts"]
_DRAW = LAUNCHES["gumbel_argmax"]
_NUM_BINS = tl.constexpr(256)
_BINS_PER_NAT = tl.constexpr(12.0)  # the bins cover distances, and differences of logits, of up to 21
_CAPACITY = 4096
"""Maximum number of logits in a row's band."""
_MAX_SPLITS = 16
_ONE = tl.constexpr(2.0**43)  # a weight of 1 in fixed point: 2**19 of them fit into int64
_DIGIT = tl.constexpr(16)
_NUM_DIGITS = tl.constexpr(8)  # four bits each, 31 in total: a distance has no sign
_EVERYTHING = tl.constexpr(2**31 - 1)
# Finalizer constants of MurmurHash3 and the golden ratio, as in pagemill.kernels.noise.
_MIX_1 = tl.constexpr(0x85EBCA6B)
_MIX_2 = tl.constexpr(0xC2B2AE35)
_GOLDEN = tl.constexpr(0x9E3779B9)


@triton.jit
def _mix(x):
    """MurmurHash3's 32-bit finalizer on uint32."""
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
    # log1p(-u) through log (Kahan): w is 1 - u as rounded, and the quotient compensates the rounding.
    w = 1.0 - uniform
    exact = tl.where(w == 1.0, 1.0, 1.0 - w)
    exponential = tl.where(w == 1.0, uniform, -tl.log(w) * (uniform / exact))
    return -tl.log(exponential)


@triton.jit
def _distances(logits_ptr, columns, is_column, peak, temperature):
    """Return the distance below the row's best logit in units of the temperature, bit for bit as torch divides."""
    logits = tl.load(logits_ptr + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    return tl.div_rn(peak - logits, temperature)


@triton.jit
def _bins(distances, temperature):
    """Return each distance's bin; the last one also holds all larger distances and NaN."""
    scaled = distances * (_BINS_PER_NAT * tl.maximum(temperature, 1.0))
    last = _NUM_BINS - 1.0
    return tl.where(distances >= 0.0, tl.minimum(scaled, last), last).to(tl.int32)


@triton.jit
def _weights(distances, keeps):
    """Return exp(-distance) in fixed point, int64; 0 for logits that are not kept."""
    return (tl.exp(-tl.where(keeps, distances, float("inf"))) * _ONE).to(tl.int64)


@triton.jit
def sampling_histogram_kernel(
    histograms_ptr,  # [num_rows, num_splits, _NUM_BINS] int32
    counters_ptr,  # [num_rows] int32, set to 0 for the next kernel
    sums_ptr,  # [num_rows, 2] int64, also set to 0
    logits_ptr,  # [num_rows, vocab_size] fp32
    peaks_ptr,  # [num_rows] fp32, each row's largest logit
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    split_size,
    stride_row,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * stride_row
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    if split == 0:
        tl.store(counters_ptr + row, 0)
        tl.store(sums_ptr + 2 * row + tl.arange(0, 2), tl.zeros([2], tl.int64))
    if ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0):
        peak, temperature = tl.load(peaks_ptr + row), tl.load(temperatures_ptr + row)
        begin = split * split_size
        end = tl.minimum(begin + split_size, vocab_size)
        counts = tl.zeros([_NUM_BINS], tl.int32)
        for start in range(begin, end, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            # Columns past the end are infinitely far: they go to the last bin, which is never searched.
            distances = _distances(logits_ptr, columns, columns < end, peak, temperature)
            counts += tl.histogram(_bins(distances, temperature), _NUM_BINS)
        histogram = (row * tl.num_programs(1) + split) * _NUM_BINS
        tl.store(histograms_ptr + histogram + tl.arange(0, _NUM_BINS), counts)


@triton.jit
def _band(counts, temperature, top_k, top_p, has_k, CAPACITY: tl.constexpr):
    """Return (first bin, last bin, logits before it, logits in it or -1 if there is no band).

    The bin of the k-th logit is known. Top-p's is estimated from the middle of each logit's bin: its band has
    some margin, and the search verifies that the cut is inside. Both together need all logits up to the k-th.
    """
    bins = tl.arange(0, _NUM_BINS)
    through = tl.cumsum(counts, 0)
    before = through - counts
    scale = _BINS_PER_NAT * tl.maximum(temperature, 1.0)
    reached = tl.cumsum(counts.to(tl.float32) * tl.exp(-(bins.to(tl.float32) + 0.5) / scale), 0)
    is_past = tl.where(has_k, through >= top_k, reached >= top_p.to(tl.float32) * tl.max(reached, 0))
    middle = tl.min(tl.where(is_past, bins, _NUM_BINS - 1), 0)
    from_middle = tl.sum(tl.where(bins < middle, counts, 0), 0)
    to_middle = tl.sum(tl.where(bins <= middle, counts, 0), 0)
    side = CAPACITY // 4
    first = tl.min(tl.where(before >= from_middle - side, bins, middle), 0)
    last = tl.max(tl.where(through <= to_middle + side, bins, middle), 0)
    first = tl.maximum(tl.minimum(first, middle - 1), 0)
    last = tl.minimum(tl.maximum(last, middle + 1), _NUM_BINS - 2)
    if has_k:
        last = middle
        first = tl.where(top_p < 1.0, 0, middle)
    size = tl.sum(tl.where((bins >= first) & (bins <= last), counts, 0), 0)
    size = tl.where((middle < _NUM_BINS - 1) & (size <= CAPACITY), size, -1)
    return first, last, tl.sum(tl.where(bins < first, counts, 0), 0), size


@triton.jit
def sampling_band_kernel(
    bands_ptr,  # [num_rows, CAPACITY] fp32: the logits of each row's band, in any order
    sizes_ptr,  # [num_rows, 2] int32: logits before the band, and in it; -1 if there is no band
    counters_ptr,  # [num_rows] int32, 0
    sums_ptr,  # [num_rows, 2] int64, 0: the weight before the band, and of the row
    histograms_ptr,  # [num_rows, num_splits, _NUM_BINS] int32
    logits_ptr,  # [num_rows, vocab_size] fp32
    peaks_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    vocab_size,
    split_size,
    stride_row,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * stride_row
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    has_k = (top_k > 0) & (top_k < vocab_size)
    if has_k | (top_p < 1.0):
        peak, temperature = tl.load(peaks_ptr + row), tl.load(temperatures_ptr + row)
        splits = tl.arange(0, SPLITS)[:, None]
        places = (row * tl.num_programs(1) + splits) * _NUM_BINS + tl.arange(0, _NUM_BINS)[None, :]
        partial = tl.load(histograms_ptr + places, mask=splits < tl.num_programs(1), other=0)
        first, last, before, size = _band(tl.sum(partial, 0), temperature, top_k, top_p, has_k, CAPACITY)
        if split == 0:
            tl.store(sizes_ptr + 2 * row, before)
            tl.store(sizes_ptr + 2 * row + 1, size)
        if size >= 0:
            begin = split * split_size
            end = tl.minimum(begin + split_size, vocab_size)
            weights_before = tl.zeros([BLOCK], tl.int64)
            weights_all = tl.zeros([BLOCK], tl.int64)
            for start in range(begin, end, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                logits = tl.load(logits_ptr + columns, mask=columns < end, other=float("-inf"))
                distances = tl.div_rn(peak - logits, temperature)
                keeps = (columns < end) & (distances >= 0.0)
                bins = _bins(distances, temperature)
                weights = _weights(distances, keeps)
                weights_before += tl.where(bins < first, weights, 0)
                weights_all += weights
                is_inside = keeps & (bins >= first) & (bins <= last)
                counters = counters_ptr + row + tl.zeros([BLOCK], tl.int32)
                slots = tl.atomic_add(counters, 1, mask=is_inside, sem="relaxed")
                tl.store(bands_ptr + row * CAPACITY + slots, logits, mask=is_inside)
            tl.atomic_add(sums_ptr + 2 * row, tl.sum(weights_before, 0), sem="relaxed")
            tl.atomic_add(sums_ptr + 2 * row + 1, tl.sum(weights_all, 0), sem="relaxed")


@triton.jit
def _kept_sums(logits_ptr, peak, temperature, size, bounds, last, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """[_DIGIT] int64: the number or weight of logits within each of the `bounds` and within `last`.

    Threads sum their columns and combine once, because a reduction in the loop would be a third of its
    instructions.
    """
    sums = tl.zeros([_DIGIT, BLOCK], tl.int64 if WEIGH else tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        distances = _distances(logits_ptr, columns, columns < size, peak, temperature)
        bits = distances.to(tl.int32, bitcast=True)
        keeps = (columns < size) & (distances >= 0.0) & (bits <= last)  # excludes NaN
        amounts = _weights(distances, keeps) if WEIGH else keeps.to(tl.int32)
        sums += tl.where(bits[None, :] <= bounds[:, None], amounts[None, :], 0)
    return tl.sum(sums, 1).to(tl.int64)


@triton.jit
def _smallest_cut(
    logits_ptr, peak, temperature, size, wanted, last, WEIGH: tl.constexpr, BLOCK: tl.constexpr
):
    """Bits of the smallest distance that covers at least `wanted`; `last` if there are fewer."""
    digits = tl.arange(0, _DIGIT)
    cut = tl.zeros([], tl.int32)
    for number in range(_NUM_DIGITS):
        shift = tl.maximum(27 - 4 * number, 0)
        bounds = cut + (digits << shift) + ((1 << shift) - 1)
        sums = _kept_sums(logits_ptr, peak, temperature, size, bounds, last, WEIGH, BLOCK)
        digit = tl.minimum(tl.sum((sums < wanted).to(tl.int32), 0), _DIGIT - 1)
        cut += digit << shift
    return tl.minimum(cut, last)


@triton.jit
def sampling_cuts_kernel(
    cuts_ptr,  # [num_rows] int32: bits of the largest allowed distance from the best logit
    bands_ptr,  # [num_rows, CAPACITY] fp32
    sizes_ptr,  # [num_rows, 2] int32
    sums_ptr,  # [num_rows, 2] int64
    logits_ptr,  # [num_rows, vocab_size] fp32
    peaks_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    vocab_size,
    stride_row,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak, temperature = tl.load(peaks_ptr + row), tl.load(temperatures_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    has_k = (top_k > 0) & (top_k < vocab_size)
    last = tl.full([], _EVERYTHING, tl.int32)
    if has_k | (top_p < 1.0):
        everywhere = tl.full([_DIGIT], _EVERYTHING, tl.int32)
        before, in_band = tl.load(sizes_ptr + 2 * row), tl.load(sizes_ptr + 2 * row + 1)
        weight_before, weight = tl.load(sums_ptr + 2 * row), tl.load(sums_ptr + 2 * row + 1)
        source, size = bands_ptr + row * CAPACITY, in_band
        if (in_band >= 0) & (top_p < 1.0) & ~has_k:
            # The estimate can miss the cut.
            wanted = _share(top_p, weight)
            inside = tl.max(_kept_sums(source, peak, temperature, size, everywhere, last, True, BLOCK), 0)
            if (wanted <= weight_before) | (wanted > weight_before + inside):
                in_band = -1
        if in_band < 0:
            source, size, before = logits_ptr + row * stride_row, vocab_size, 0
            weight_before = tl.zeros([], tl.int64)
        if has_k:
            wanted_count = (top_k - before).to(tl.int64)
            last = _smallest_cut(source, peak, temperature, size, wanted_count, last, False, BLOCK)
        if top_p < 1.0:
            if has_k | (in_band < 0):
                weight = tl.max(_kept_sums(source, peak, temperature, size, everywhere, last, True, BLOCK), 0)
            wanted = _share(top_p, weight) - weight_before
            last = _smallest_cut(source, peak, temperature, size, wanted, last, True, BLOCK)
    farthest = tl.abs(tl.load(log_min_p_ptr + row))  # abs: -0 is not a valid distance
    last = tl.minimum(last, farthest.to(tl.int32, bitcast=True))
    tl.store(cuts_ptr + row, last)


@triton.jit
def _share(top_p, weight):
    """Return the smallest integer that is at least top_p * weight."""
    share = top_p * weight.to(tl.float64)
    whole = share.to(tl.int64)
    return whole + (whole.to(tl.float64) < share).to(tl.int64)


@triton.jit
def gumbel_argmax_kernel(
    best_ptr,  # [num_rows, num_splits] fp32: each split's highest sum of logit and noise
    ids_ptr,  # [num_rows, num_splits] int64: its token
    logits_ptr,  # [num_rows, vocab_size] fp32
    peaks_ptr,  # [num_rows] fp32
    cuts_ptr,  # [num_rows] int32, or None: no filter
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
        best_id = tl.where(tile_best > best, start + tile_id, best_id)  # of equal sums, the lowest id
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
    cuts = _cuts(logits, peaks, rows) if has_filters else None
    num_splits = sampling_splits(num_rows, vocab_size, _DRAW.block, MAX_SAMPLING_SPLITS, logits.device)
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


def _cuts(logits: torch.Tensor, peaks: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the bits of each row's largest allowed distance, [num_rows] int32."""
    bands, sizes, sums = _bands(logits, peaks, rows)
    cuts = logits.new_empty(len(logits), dtype=torch.int32)
    sampling_cuts_kernel[(len(logits),)](
        cuts,
        bands,
        sizes,
        sums,
        logits,
        peaks,
        rows.temperatures,
        rows.top_k,
        rows.top_p,
        rows.log_min_p,
        logits.shape[1],
        logits.stride(0),
        CAPACITY=_CAPACITY,
        BLOCK=_CUTS.block,
        num_warps=_CUTS.num_warps,
    )
    return cuts


def _bands(
    logits: torch.Tensor, peaks: torch.Tensor, rows: SamplingRows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's band, its sizes and its sums, as `sampling_band_kernel` writes them."""
    num_rows, vocab_size = logits.shape
    num_splits = sampling_splits(num_rows, vocab_size, _HISTOGRAM.block, _MAX_SPLITS, logits.device)
    split_size = triton.cdiv(triton.cdiv(vocab_size, num_splits), _HISTOGRAM.block) * _HISTOGRAM.block
    histograms = logits.new_empty((num_rows, num_splits, _NUM_BINS.value), dtype=torch.int32)
    counters = logits.new_empty(num_rows, dtype=torch.int32)
    sums = logits.new_empty((num_rows, 2), dtype=torch.int64)
    sampling_histogram_kernel[(num_rows, num_splits)](
        histograms,
        counters,
        sums,
        logits,
        peaks,
        rows.temperatures,
        rows.top_k,
        rows.top_p,
        vocab_size,
        split_size,
        logits.stride(0),
        BLOCK=_HISTOGRAM.block,
        num_warps=_HISTOGRAM.num_warps,
    )
    bands = logits.new_empty((num_rows, _CAPACITY))
    sizes = logits.new_empty((num_rows, 2), dtype=torch.int32)
    sampling_band_kernel[(num_rows, num_splits)](
        bands,
        sizes,
        counters,
        sums,
        histograms,
        logits,
        peaks,
        rows.temperatures,
        rows.top_k,
        rows.top_p,
        vocab_size,
        split_size,
        logits.stride(0),
        CAPACITY=_CAPACITY,
        SPLITS=_MAX_SPLITS,
        BLOCK=_BAND.block,
        num_warps=_BAND.num_warps,
    )
    return bands, sizes, sums
