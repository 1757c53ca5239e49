"""The attention kernels' sections of `benchmarks.gpu`.

Every section takes its device, so that the tests can walk through it without a GPU, in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from pagemill.kernels import dispatch, reference
from pagemill.kernels.gpu.attention_decode import paged_attention_decode
from pagemill.kernels.gpu.attention_prefill import paged_attention_prefill
from pagemill.kernels.gpu.tuning import Tile, compute_capability, decode_tile, prefill_tile
from pagemill.kernels.types.layer_cache import FP8, LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring
from tests.kernels.paged_case import TOLERANCE, assert_close, make_case

Row = dict[str, Any]
Measure = Callable[[Callable[[], object]], float]  # seconds that a call takes on the device


@dataclass(frozen=True)
class Shape:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


LLAMA_8B = Shape("llama-3.1-8b", 32, 8, 128)
QWEN_600M = Shape("qwen3-0.6b", 16, 8, 128)
FALCON_7B = Shape("falcon-7b", 71, 1, 64)
GPT2 = Shape("gpt2", 12, 12, 64)
GEMMA_2B = Shape("gemma-2b", 8, 1, 256)

TIMED_SHAPES = (LLAMA_8B, QWEN_600M, FALCON_7B, GEMMA_2B)
TIMED_BLOCK_SIZES = (16, 64)

# One timed call walks over enough layers that none of their keys is still in the L2 cache when its turn comes.
_BYTES_PER_CALL = 512 * 2**20
_LARGEST_CACHE_BYTES = 40 * 2**30


@dataclass
class Workload:
    """A step over several layers with random contents and shuffled blocks."""

    query: torch.Tensor
    layers: list[LayerCache]
    metadata: AttentionMetadata
    scoring: Scoring

    def run(self) -> None:
        for layer in self.layers:
            with dispatch.override("triton"):
                dispatch.paged_attention(self.query, layer, self.metadata, self.scoring)


def make_workload(
    shape: Shape,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16,
    num_layers: int = 1,
) -> Workload:
    torch.manual_seed(0)
    blocks_of = [math.ceil(seq_len / block_size) for seq_len in seq_lens]
    tables = torch.zeros((len(seq_lens), max(blocks_of)), dtype=torch.int32)
    blocks = torch.randperm(sum(blocks_of)).to(torch.int32)
    for row, part in enumerate(blocks.split(blocks_of)):
        tables[row, : len(part)] = part
    cache_shape = (sum(blocks_of), shape.num_kv_heads, block_size, shape.head_dim)

    def random(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_()

    return Workload(
        query=random(sum(query_lens), shape.num_heads, shape.head_dim),
        layers=[LayerCache(random(*cache_shape), random(*cache_shape)) for _ in range(num_layers)],
        metadata=AttentionMetadata(
            block_tables=tables.to(device),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            slot_mapping=torch.full((sum(query_lens),), -1, device=device),
            query_lens_host=list(query_lens),
            seq_lens_host=list(seq_lens),
            num_decode_rows=sum(query_len == 1 for query_len in query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        ),
        scoring=Scoring(shape.head_dim**-0.5),
    )


_SHORT, _MIXED = ([1, 1, 1], [1, 16, 17]), ([1, 1, 40, 300], [700, 33, 40, 900])
_LONG = ([1, 1, 1500], [5000, 9000, 6000])
EVERY_CASE: list[tuple[tuple[list[int], list[int]], Shape, dict[str, Any]]] = [
    *((_MIXED, shape, {}) for shape in (LLAMA_8B, QWEN_600M, FALCON_7B, GPT2, GEMMA_2B)),
    *((_MIXED, Shape(f"dim {dim}", 6, 2, dim), {}) for dim in (80, 96)),
    *((_SHORT, LLAMA_8B, {"block_size": size}) for size in (8, 16, 32, 64, 128)),
    *((_MIXED, LLAMA_8B, {"block_size": size}) for size in (8, 32, 64, 128)),
    (_LONG, LLAMA_8B, {}),
    (_MIXED, LLAMA_8B, {"padded_decode_rows": 3, "padded_tokens": 5}),
    *(
        (_MIXED, shape, {"cache_dtype": dtype})
        for shape in (LLAMA_8B, GEMMA_2B)
        for dtype in (torch.int8, FP8)
    ),
    (_MIXED, LLAMA_8B, {"alibi": True}),
    (_MIXED, LLAMA_8B, {"softcap": 2.0}),
    (_MIXED, LLAMA_8B, {"sliding_window": 100, "free_outside_window": True}),
]


def correctness(
    device: torch.device,
    cases: Sequence[tuple[tuple[list[int], list[int]], Shape, dict[str, Any]]] = tuple(EVERY_CASE),
    dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32),
) -> Iterator[Row]:
    """Each case's largest error against the reference in fp64, over NaN-poisoned caches."""
    for ((query_lens, seq_lens), shape, options), dtype in product(cases, dtypes):
        case = make_case(
            query_lens,
            seq_lens,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            **options,
        ).to(device)
        with dispatch.override("triton"):
            out = dispatch.paged_attention(case.query, case.cache, case.metadata, case.scoring)
        double = case.in_double()
        truth = reference.paged_attention(double.query, double.cache, double.metadata, double.scoring)
        real = case.real_tokens()
        row: Row = {
            "case": f"{shape.name} {query_lens}/{seq_lens} {options or ''}",
            "dtype": str(dtype).removeprefix("torch."),
            "max_error": f"{(out.double() - truth)[real].abs().max().item():.1e}",
            "ok": True,
        }
        try:
            assert_close(out, truth, case, TOLERANCE[dtype])
        except AssertionError as error:
            row |= {"ok": False, "why": str(error)}
        yield row


def decode(
    device: torch.device,
    measure: Measure,
    copy_gb_per_s: float | None,
    *,
    shapes: Sequence[Shape] = (LLAMA_8B, QWEN_600M, FALCON_7B),
    batch_sizes: Sequence[int] = (1, 8, 64, 256),
    kv_lens: Sequence[int] = (256, 1024, 4096, 16384),
    block_sizes: Sequence[int] = TIMED_BLOCK_SIZES,
    bytes_per_call: int = _BYTES_PER_CALL,
) -> Iterator[Row]:
    """Bytes of keys and values per second, beside the measured copy bandwidth."""
    for shape, block_size, batch_size, kv_len in product(shapes, block_sizes, batch_sizes, kv_lens):
        layer_bytes = 2 * 2 * batch_size * kv_len * shape.num_kv_heads * shape.head_dim
        num_layers = min(32, max(1, bytes_per_call // layer_bytes))
        if layer_bytes * num_layers > _LARGEST_CACHE_BYTES:
            continue
        workload = make_workload(
            shape,
            [1] * batch_size,
            [kv_len] * batch_size,
            device,
            block_size=block_size,
            num_layers=num_layers,
        )
        seconds = measure(workload.run) / num_layers
        gb_per_s = layer_bytes / seconds / 1e9
        yield {
            "shape": shape.name,
            "block_size": block_size,
            "batch_size": batch_size,
            "kv_len": kv_len,
            "microseconds": round(seconds * 1e6, 1),
            "gb_per_s": round(gb_per_s),
            "of_copy": _share(gb_per_s, copy_gb_per_s),
        }


_PREFILLS = (
    ([512], [512]),
    ([2048], [2048]),
    ([8192], [8192]),
    ([16384], [16384]),
    ([2048], [16384]),
    ([1024] * 8, [1024] * 8),
)


def prefill(
    device: torch.device,
    measure: Measure,
    tflop_per_s: float | None,
    *,
    shapes: Sequence[Shape] = (LLAMA_8B, QWEN_600M, GEMMA_2B),
    batches: Sequence[tuple[list[int], list[int]]] = _PREFILLS,
) -> Iterator[Row]:
    """Floating-point operations of visible keys per second; beside it torch's own attention without paging."""
    for shape, (query_lens, seq_lens) in product(shapes, batches):
        workload = make_workload(shape, query_lens, seq_lens, device)
        operations = _prefill_operations(shape, query_lens, seq_lens)
        seconds = measure(workload.run)
        row: Row = {
            "shape": shape.name,
            "query_lens": f"{len(query_lens)} x {query_lens[0]}",
            "kv_len": seq_lens[0],
            "microseconds": round(seconds * 1e6, 1),
            "tflop_per_s": round(operations / seconds / 1e12, 1),
            "of_product": _share(operations / seconds / 1e12, tflop_per_s),
            "torch_tflop_per_s": None,
        }
        if query_lens == seq_lens:
            dense_seconds = measure(_dense_prefill(shape, len(query_lens), query_lens[0], device))
            row["torch_tflop_per_s"] = round(operations / dense_seconds / 1e12, 1)
        yield row


def _prefill_operations(shape: Shape, query_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
    visible = sum(
        query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2
        for query_len, seq_len in zip(query_lens, seq_lens, strict=True)
    )
    return 4 * visible * shape.num_heads * shape.head_dim


def _dense_prefill(
    shape: Shape, batch_size: int, length: int, device: torch.device
) -> Callable[[], torch.Tensor]:
    def random(num_heads: int) -> torch.Tensor:
        size = (batch_size, num_heads, length, shape.head_dim)
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_()

    query, key, value = random(shape.num_heads), random(shape.num_kv_heads), random(shape.num_kv_heads)
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


DECODE_TILES = [
    Tile(16, block_n, num_warps, num_stages)
    for block_n, num_warps, num_stages in [
        (32, 4, 3), (32, 4, 5), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3),
    ]
]  # fmt: skip
_TILE_LAYERS = 4  # of 64 MiB and more: together they are several times the L2 cache
PREFILL_TILES = [
    Tile(*numbers)
    for numbers in [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 3), (128, 64, 4, 2), (128, 64, 8, 2),
        (128, 64, 8, 3), (128, 128, 8, 2),
    ]
]  # fmt: skip


def tiles(
    device: torch.device,
    measure: Measure,
    *,
    shape: Shape = LLAMA_8B,
    decodes: Sequence[tuple[int, int]] = ((1, 16384), (64, 2048)),
    prefill_len: int = 4096,
    decode_tiles: Sequence[Tile] = tuple(DECODE_TILES),
    prefill_tiles: Sequence[Tile] = tuple(PREFILL_TILES),
) -> Iterator[Row]:
    """Other tiles than the tuning table's: what to put there. One that the device has no room for says so."""
    chosen = decode_tile(shape.head_dim, shape.num_heads // shape.num_kv_heads, 2, compute_capability(device))
    for batch_size, kv_len in decodes:
        workload = make_workload(
            shape, [1] * batch_size, [kv_len] * batch_size, device, num_layers=_TILE_LAYERS
        )
        for tile in decode_tiles:
            row = _tile_row(f"decode {batch_size} x {kv_len}", tile, tile == chosen)
            yield row | _tile_time(measure, _decode_call(workload, tile), _TILE_LAYERS)
    chosen = prefill_tile(shape.head_dim, 2, compute_capability(device))
    workload = make_workload(shape, [prefill_len], [prefill_len], device)
    for tile in prefill_tiles:
        row = _tile_row(f"prefill {prefill_len}", tile, tile == chosen)
        yield row | _tile_time(measure, _prefill_call(workload, tile), 1)


def _tile_time(measure: Measure, run: Callable[[], None], num_layers: int) -> Row:
    try:
        return {"microseconds": round(measure(run) / num_layers * 1e6, 1)}
    except OutOfResources as error:
        return {"microseconds": None, "why": str(error)}


def _decode_call(workload: Workload, tile: Tile) -> Callable[[], None]:
    out = torch.empty_like(workload.query)

    def run() -> None:
        for layer in workload.layers:
            paged_attention_decode(
                out,
                workload.query,
                layer,
                workload.metadata.block_tables,
                workload.metadata.seq_lens,
                workload.scoring,
                max_seq_len=workload.metadata.max_seq_len,
                tile=tile,
            )

    return run


def _prefill_call(workload: Workload, tile: Tile) -> Callable[[], None]:
    out = torch.empty_like(workload.query)
    return lambda: paged_attention_prefill(
        out, workload.query, workload.layers[0], workload.metadata, workload.scoring, tile=tile
    )


def _tile_row(what: str, tile: Tile, is_chosen: bool) -> Row:
    return {
        "what": what,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "in_table": "yes" if is_chosen else "",
    }


def _share(value: float, ceiling: float | None) -> str:
    return f"{value / ceiling:.0%}" if ceiling else ""
