"""Random paged batches with poison in all memory that must not be read, and the exact results.

Unused blocks, unused slots of used blocks and padded query tokens hold NaN; block-table entries past a row's
length hold ids far outside the cache. A kernel that touches any of them returns NaN or faults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from pagemill.kernels.reference import quantize
from pagemill.kernels.types.layer_cache import LayerCache, as_bytes
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring

WILD_BLOCK_ID = 2**31 - 1

# Largest allowed |out - truth| for inputs drawn from N(0, 1). An output is a convex combination of values of size
# about 4, so half precision rounds it by up to 4 * 2^-11 (fp16) or 4 * 2^-8 (bf16), and once more in the weights.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass
class PagedCase:
    """One step over one layer's cache. `dense_keys[row]` are the row's keys [seq_len, num_kv_heads,
    head_dim], with the values in the cache."""

    query: torch.Tensor
    cache: LayerCache
    metadata: AttentionMetadata
    dense_keys: list[torch.Tensor]
    dense_values: list[torch.Tensor]
    scoring: Scoring

    def to(self, device: torch.device) -> PagedCase:
        """Return the same values on `device`; lengths on the host stay there."""
        moved = {
            name: getattr(self.metadata, name).to(device)
            for name in ("block_tables", "query_start_loc", "seq_lens", "slot_mapping")
        }
        per_head = {
            name: None if tensor is None else tensor.to(device)
            for name in ("alibi_slopes", "sinks")
            for tensor in [getattr(self.scoring, name)]
        }
        return PagedCase(
            self.query.to(device),
            LayerCache(*(tensor.to(device) for tensor in self.cache.tensors())),
            replace(self.metadata, **moved, work_lists={}),
            [keys.to(device) for keys in self.dense_keys],
            [values.to(device) for values in self.dense_values],
            replace(self.scoring, **per_head),
        )

    def in_double(self) -> PagedCase:
        """Return the same values in fp64, without scales."""
        return PagedCase(
            self.query.double(),
            LayerCache(
                _in_double(self.cache.keys, self.cache.key_scales),
                _in_double(self.cache.values, self.cache.value_scales),
            ),
            self.metadata,
            [keys.double() for keys in self.dense_keys],
            [values.double() for values in self.dense_values],
            self.scoring,
        )

    def real_tokens(self) -> torch.Tensor:
        """[num_tokens] bool: False at padding."""
        lens = zip(self.metadata.query_lens_host, self.metadata.seq_lens_host, strict=True)
        flags = [seq_len > 0 for query_len, seq_len in lens for _ in range(query_len)]
        flags += [False] * (self.query.shape[0] - len(flags))
        return torch.tensor(flags)


def _in_double(numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return numbers.double() if scales is None else numbers.double() * scales.double()[..., None]


class _Blocks:
    """A cache under construction: poison everywhere except where keys are stored."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
        self.is_scaled = cache_dtype.itemsize == 1
        self.scales = torch.full(shape[:-1], math.nan) if self.is_scaled else None
        if cache_dtype is torch.int8:
            self.numbers = torch.full(shape, 127, dtype=cache_dtype)
        else:
            self.numbers = torch.full(shape, math.nan).to(cache_dtype)
        self._dtype = dtype

    def put(self, block: int, tokens: torch.Tensor) -> torch.Tensor:
        """Store tokens [n, num_kv_heads, head_dim] from the block's start; return their stored values."""
        n, stored = len(tokens), tokens
        if self.scales is None:
            numbers = tokens.to(self.numbers.dtype)
            stored = numbers.to(self._dtype)
        else:
            numbers, scales = quantize(tokens, self.numbers.dtype)
            self.scales[block, :, :n] = scales.transpose(0, 1)
            stored = _in_double(numbers, scales).to(self._dtype)
        as_bytes(self.numbers)[block, :, :n] = as_bytes(numbers).transpose(0, 1)
        return stored


class _Pool:
    """The blocks of a layer, which rows allocate in random order."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        generator: torch.Generator,
    ) -> None:
        """`shape`: [num_blocks, num_kv_heads, block_size, head_dim]."""
        self._keys, self._values = (_Blocks(shape, dtype, cache_dtype) for _ in range(2))
        self._free = torch.randperm(shape[0], generator=generator).tolist()
        self._block_size = shape[2]

    def put(self, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_kept: int) -> None:
        """Store a row's keys and values, and their blocks in its table; blocks that end before token
        `first_kept` are released. `keys` and `values` are replaced by their stored values."""
        for index, start in enumerate(range(0, len(keys), self._block_size)):
            if start + self._block_size <= first_kept:
                continue
            block = self._free.pop()
            table[index] = block
            part = slice(start, start + self._block_size)
            keys[part] = self._keys.put(block, keys[part])
            values[part] = self._values.put(block, values[part])

    def slots(self, table: torch.Tensor, first: int, end: int) -> list[int]:
        """Return the slots of a row's tokens `first` to `end`."""
        size = self._block_size
        return [int(table[at // size]) * size + at % size for at in range(first, end)]

    def cache(self) -> LayerCache:
        keys, values = self._keys, self._values
        return LayerCache(keys.numbers, values.numbers, keys.scales, values.scales)


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    alibi: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    padded_decode_rows: int = 0,
    padded_tokens: int = 0,
    free_outside_window: bool = False,
    seed: int = 0,
) -> PagedCase:
    """Create a case; rows with one query token come first.

    `padded_decode_rows` rows of length 0 follow the decode rows, with one token each, as in a bucket of a
    captured graph. `padded_tokens` tokens without a row are at the end of the batch. `dtype` is that of the
    queries, and of the cache unless `cache_dtype` is set. `free_outside_window` also releases the blocks that
    no query token's window reaches, as an engine can.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    num_decode_rows = sum(query_len == 1 for query_len in query_lens) + padded_decode_rows
    decodes = num_decode_rows - padded_decode_rows
    query_lens = query_lens[:decodes] + [1] * padded_decode_rows + query_lens[decodes:]
    seq_lens = seq_lens[:decodes] + [0] * padded_decode_rows + seq_lens[decodes:]

    blocks_of = [math.ceil(seq_len / block_size) for seq_len in seq_lens]
    shape = (sum(blocks_of) + 3, num_kv_heads, block_size, head_dim)
    pool = _Pool(shape, dtype, cache_dtype or dtype, generator)
    tables = torch.full((len(seq_lens), max(blocks_of) + 2), WILD_BLOCK_ID, dtype=torch.int32)
    dense_keys, dense_values, slots = [], [], []
    for table, query_len, seq_len in zip(tables, query_lens, seq_lens, strict=True):
        keys, values = draw(seq_len, num_kv_heads, head_dim), draw(seq_len, num_kv_heads, head_dim)
        window = sliding_window if free_outside_window else None
        pool.put(table, keys, values, first_key(window, seq_len - query_len) if seq_len else 0)
        dense_keys.append(keys)
        dense_values.append(values)
        slots += pool.slots(table, seq_len - query_len, seq_len) if seq_len else [-1] * query_len

    num_tokens = sum(query_lens) + padded_tokens
    query = draw(num_tokens, num_heads, head_dim)
    metadata = AttentionMetadata(
        block_tables=tables,
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping=torch.tensor(slots + [-1] * padded_tokens, dtype=torch.int64),
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
        num_decode_rows=num_decode_rows,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    slopes = torch.rand(num_heads, generator=generator) if alibi else None
    scoring = Scoring(head_dim**-0.5, slopes, sliding_window, softcap)
    if sinks:  # from far below the scores to far above them
        scoring = replace(scoring, sinks=torch.linspace(-3.0, 6.0, num_heads))
    case = PagedCase(query, pool.cache(), metadata, dense_keys, dense_values, scoring)
    case.query[~case.real_tokens()] = math.nan
    return case


def first_key(window: int | None, position: int) -> int:
    """Return the first key that a query sees, by counting back from the query's position."""
    first = position
    while first > 0 and (not window or (position - first + 1 < window if window > 0 else first % -window)):
        first -= 1
    return first


def dense_attention(case: PagedCase) -> torch.Tensor:
    """The textbook formula over the dense keys, with absolute ALiBi positions; NaN at padding."""
    num_heads, scoring = case.query.shape[1], case.scoring
    out = torch.full_like(case.query, math.nan)
    start = 0
    for row, (query_len, seq_len) in enumerate(
        zip(case.metadata.query_lens_host, case.metadata.seq_lens_host, strict=True)
    ):
        if seq_len == 0:
            start += query_len
            continue
        group_size = num_heads // case.dense_keys[row].shape[1]
        for token in range(query_len):
            position = seq_len - query_len + token
            first = first_key(scoring.sliding_window, position)
            for head in range(num_heads):
                keys = case.dense_keys[row][first : position + 1, head // group_size]
                values = case.dense_values[row][first : position + 1, head // group_size]
                scores = keys @ case.query[start + token, head] * scoring.scale
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                if scoring.alibi_slopes is not None:
                    slope = scoring.alibi_slopes[head].to(scores.dtype)
                    origin = 0 if scoring.sinks is None else position
                    scores = scores + slope * (torch.arange(first, position + 1) - origin)
                if scoring.sinks is not None:
                    scores = torch.cat([scores, scoring.sinks[head : head + 1].to(scores.dtype)])
                out[start + token, head] = scores.softmax(0)[: len(values)] @ values
        start += query_len
    return out


def assert_close(out: torch.Tensor, truth: torch.Tensor, case: PagedCase, tolerance: float) -> None:
    """Check that `out` equals `truth` at every real token; NaN never passes."""
    real = case.real_tokens()
    error = (out[real].double() - truth[real].double()).abs()
    assert not error.isnan().any(), (
        f"NaN in {int(error.isnan().any(-1).sum())} of {error[..., 0].numel()} heads"
    )
    assert error.max().item() <= tolerance, f"error {error.max().item():.2e} > {tolerance:.0e}"
