"""The operators in plain torch, one row at a time: the reference for every other implementation.

Computed in fp32, or in fp64 for fp64 inputs. Simple rather than fast; works on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagemill.kernels.noise import gumbel_noise, noise_keys
from pagemill.kernels.types.layer_cache import SMALLEST_PEAK, LayerCache, as_bytes, largest_number
from pagemill.kernels.types.low_rank import NO_ADAPTER, AdapterRows, LowRankTable
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.rotation import Rotation
from pagemill.kernels.types.sampling_rows import SamplingRows
from pagemill.kernels.types.scoring import Scoring
from pagemill.kernels.types.tiled_weight import TiledWeight
from pagemill.kernels.types.window import first_visible


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
) -> None:
    """Write every token's key and value to its slot of one layer's cache.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim]; views with any strides over a contiguous last
            dimension. Converted to the cache's dtype; for int8 and fp8 quantized per token and head, to nearest.
        slot_mapping: [num_tokens] int64, block id * block_size + offset; -1 skips the token. No slot twice.
    """
    is_real = slot_mapping >= 0
    slots = slot_mapping[is_real]
    blocks, offsets = slots // cache.block_size, slots % cache.block_size
    for tokens, target, scales in (
        (key, cache.keys, cache.key_scales),
        (value, cache.values, cache.value_scales),
    ):
        numbers = tokens[is_real]
        if scales is not None:
            numbers, scale = quantize(numbers, target.dtype)
            scales[blocks, :, offsets] = scale
        as_bytes(target)[blocks, :, offsets] = as_bytes(numbers.to(target.dtype))


def grouped_matmul(x: torch.Tensor, weight: TiledWeight) -> torch.Tensor:
    """x W^T for x [num_rows, in_features] with its values in the weight's order; new, [num_rows, out_features].

    Computed in fp32 from x and the dequantized weight, and rounded once; a kernel may round the dequantized weight to
    x's dtype. The last dimension of x is contiguous.
    """
    wide = x if x.dtype is torch.float64 else x.float()
    return (wide @ weight.numbers().to(wide.dtype).t()).to(x.dtype)


def quantize(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(values of an int8 or fp8 cache, fp32 scales): one scale per vector of the last dimension."""
    limit = largest_number(dtype)
    assert limit is not None, f"{dtype} is stored as it is"
    numbers = numbers.float()
    scales = numbers.abs().amax(dim=-1).clamp(min=SMALLEST_PEAK) / limit
    scaled = (numbers / scales[..., None]).clamp(-limit, limit)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy blocks (source, destination) within one layer's caches, in place.

    Pairs never chain: no block is the destination of one pair and the source or destination of another.
    """
    if not block_pairs:
        return
    sources, destinations = torch.tensor(block_pairs, device=key_cache.device).unbind(1)
    key_cache[destinations] = key_cache[sources]
    value_cache[destinations] = value_cache[sources]


def paged_attention(
    query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
) -> torch.Tensor:
    """Causal attention of one step's tokens over one layer's paged cache: softmax over the visible keys' scores.

    Unused blocks, unused slots and block-table entries past a row's length are never read. The same applies
    to blocks completely before the windows of all query tokens.

    Args:
        query: [num_tokens, num_heads, head_dim], last dimension contiguous; num_heads is a multiple of
            num_kv_heads, and consecutive heads share a KV head.
        cache: with this step's keys and values already written; its block_size is a power of two.

    Returns:
        [num_tokens, num_heads, head_dim], new and contiguous. Values at padded tokens are undefined.
    """
    # Padded tokens become zeros here.
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    compute_dtype = _compute_dtype(query)
    start = 0
    rows = zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
    for row, (query_len, seq_len) in enumerate(rows):
        if query_len > 0 and seq_len > 0:
            # Blocks completely before the first query token's window may have been freed; do not read them.
            first_key = max(0, first_visible(scoring.sliding_window or 0, seq_len - query_len))
            span = _Span(metadata.block_tables[row], cache.block_size, first_key, seq_len)
            out[start : start + query_len] = _attend(
                query[start : start + query_len].to(compute_dtype),
                span.gather(cache.keys, cache.key_scales, compute_dtype),
                span.gather(cache.values, cache.value_scales, compute_dtype),
                span.first_position,
                scoring,
            ).to(out.dtype)
        start += query_len
    return out


class _Span:
    """A row's slots from the block that contains `first_key` to `seq_len`."""

    def __init__(self, table: torch.Tensor, block_size: int, first_key: int, seq_len: int) -> None:
        first_block = first_key // block_size
        self._blocks = table[first_block : -(-seq_len // block_size)].long()
        self.first_position = first_block * block_size
        self._num_unseen = first_key - self.first_position
        self._length = seq_len - self.first_position

    def gather(self, cache: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the slots' values, [num_kv_heads, n, head_dim]."""
        slots = as_bytes(cache)[self._blocks].view(cache.dtype).to(dtype)
        if scales is not None:
            slots = slots * scales[self._blocks].to(dtype)[..., None]
        slots = slots.transpose(0, 1).flatten(1, 2)
        # In the first block, keys before the window are undefined. Zero them, so that 0 * NaN cannot occur.
        slots[:, : self._num_unseen] = 0
        return slots[:, : self._length]


def _attend(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [num_kv_heads, n, head_dim]
    values: torch.Tensor,
    first_position: int,  # of keys[:, 0]
    scoring: Scoring,
) -> torch.Tensor:
    num_kv_heads, num_keys, _ = keys.shape
    query_len, num_heads, _ = query.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=0)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=0)

    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    key_positions = first_position + torch.arange(num_keys, device=query.device)
    query_positions = key_positions[-1] - query_len + 1 + torch.arange(query_len, device=query.device)
    distances = key_positions[None, :] - query_positions[:, None]
    if scoring.alibi_slopes is not None:
        # Relative to the query: softmax cancels the difference to absolute positions, and rounding errors do
        # not grow.
        scores = scores + scoring.alibi_slopes.to(query.dtype)[:, None, None] * distances
    hidden = distances > 0
    if scoring.sliding_window:
        first = first_visible(scoring.sliding_window, query_positions)
        hidden = hidden | (key_positions[None, :] < first[:, None])
    scores = scores.masked_fill(hidden, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype)[:, None, None].expand(-1, query_len, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    return (weights @ values).transpose(0, 1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension of x [num_rows, size]; new.

    Computed in fp32 and rounded once. The last dimension is contiguous; weight is [size].
    """
    wide = x.to(_compute_dtype(x))
    return (wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * weight.to(wide.dtype)).to(
        x.dtype
    )


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both new and contiguous; the norm is that of the rounded sum."""
    total = (x.to(_compute_dtype(x)) + residual).to(x.dtype)
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [num_rows, 2 * size], the gate first; new, [num_rows, size]."""
    gate, up = gate_up.to(_compute_dtype(gate_up)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotation of queries and keys by `rotation`, and `reshape_and_cache` of keys and values.

    Args:
        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; views with any
            strides over a contiguous last dimension. Keys are rounded to their dtype before the cache's.

    Returns:
        The queries for attention, [num_tokens, num_heads, head_dim], new and contiguous.
    """
    reshape_and_cache(_turn(key, rotation.key_weight, rotation), value, cache, slot_mapping)
    return _turn(query, rotation.query_weight, rotation)


def _turn(heads: torch.Tensor, norm_weight: torch.Tensor | None, rotation: Rotation) -> torch.Tensor:
    x = heads.to(_compute_dtype(heads), memory_format=torch.contiguous_format, copy=True)
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, rotation.eps)
    if rotation.cos is not None and rotation.sin is not None:
        turning = x[..., : rotation.rotary_dim]
        low, high = turning.chunk(2, dim=-1)
        cos, sin = rotation.cos[:, None].to(x.dtype), rotation.sin[:, None].to(x.dtype)
        x[..., : rotation.rotary_dim] = turning * cos + torch.cat([-high, low], dim=-1) * sin
    return x.to(heads.dtype)


def sample_tokens(
    logits: torch.Tensor, peaks: torch.Tensor, rows: SamplingRows, *, has_filters: bool
) -> torch.Tensor:
    """Draw one token per row: argmax of (logit - peak) / temperature + Gumbel noise over the filtered tokens.

    The filters are top-k, top-p and min-p, each applied to the result of the previous one; ties with the last
    token remain. The noise is that of `pagemill.kernels.noise`: a row's token depends only on its logits and
    entry. Implementations agree unless two tokens are within rounding of each other. A row with NaN returns
    any valid id.

    Args:
        logits: [num_rows, vocab_size] fp32, the last dimension contiguous. Not changed.
        peaks: [num_rows] fp32, each row's largest logit.
        has_filters: whether any row has a filter; if False, filters are not read.

    Returns:
        [num_rows] int64.
    """
    scaled = (logits - peaks[:, None]) / rows.temperatures[:, None]
    if has_filters:
        scaled = torch.stack([_filtered(row, rows, number) for number, row in enumerate(scaled)])
    keys = noise_keys(rows.seeds, rows.sample_indices, rows.positions)
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    return (scaled + gumbel_noise(keys, token_ids)).argmax(dim=-1)


def _filtered(row: torch.Tensor, rows: SamplingRows, number: int) -> torch.Tensor:
    """Apply top-k, top-p and min-p, each to the result of the previous one; ties with the last token remain."""
    top_k, top_p = int(rows.top_k[number]), rows.top_p[number]
    if 0 < top_k < len(row):
        row = row.masked_fill(row < row.topk(top_k).values[-1], -torch.inf)
    if top_p < 1.0:
        reached = (ordered := row.sort(descending=True).values).softmax(0).cumsum(0, dtype=torch.float64)
        num_before = int((reached < top_p).sum())
        row = row.masked_fill(row < ordered[min(num_before, len(row) - 1)], -torch.inf)
    return row.masked_fill(row < rows.log_min_p[number], -torch.inf)


def add_low_rank(out: torch.Tensor, x: torch.Tensor, table: LowRankTable, rows: AdapterRows) -> None:
    """Add each row's adapter change: out[r] += x[r] A^T B, with A and B of `rows.slots[r]`, per part.

    Rows without an adapter are not changed. Computed in fp32 and rounded once.

    Args:
        out: [num_rows, out_features]; x: [num_rows, in_features], of one dtype, the last dimensions contiguous.
        table: has matrices of the same dtype in every slot that the rows refer to.
    """
    starts = table.starts.tolist()
    for slot in set(rows.slots.tolist()) - {NO_ADAPTER}:
        places = torch.nonzero(rows.slots == slot)[:, 0]
        given = x[places].to(_compute_dtype(x))
        for matrices, begin, end in zip(table.matrices[slot], starts, starts[1:], strict=False):
            if matrices is not None:
                a, b = (matrix.to(given.dtype) for matrix in matrices)
                total = out[places, begin:end].to(given.dtype) + given @ a.t() @ b
                out[places, begin:end] = total.to(out.dtype)


def _compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
