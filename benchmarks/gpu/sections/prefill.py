"""Prefill attention: operations of visible keys; then the same with libraries, one of them without paging."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.gpu.attention import GEMMA_2B, LLAMA_8B, QWEN_600M, TOY, key_bytes, make_workload, peer_rows
from benchmarks.gpu.floors import visible_keys
from benchmarks.gpu.models import Shape
from benchmarks.gpu.section import Bench, Row

SHAPES = (LLAMA_8B, QWEN_600M, GEMMA_2B)
BATCHES = (*([(size, size)] for size in (512, 2048, 8192, 16384)), [(2048, 16384)], [(1024, 1024)] * 8)
_WANTED_FLOPS = 400e12
"""Causal, at 8,192 tokens and 128 dims."""


def run(bench: Bench) -> Iterator[Row]:
    if bench.is_tiny:
        yield from timed(bench, (TOY,), [[(16, 16)], [(4, 20)]])
    else:
        yield from timed(bench, SHAPES, BATCHES)


def run_headline(bench: Bench) -> Iterator[Row]:
    """Run one model."""
    yield from timed(bench, (TOY,), [[(16, 16)]]) if bench.is_tiny else timed(bench, (LLAMA_8B,), BATCHES)


def timed(bench: Bench, shapes: Sequence[Shape], batches: Sequence[list[tuple[int, int]]]) -> Iterator[Row]:
    """`batches`: (query length, sequence length) of each row."""
    for shape, rows in product(shapes, batches):
        query_len, seq_len = rows[0]
        operations = 4 * visible_keys(rows) * shape.num_heads * shape.head_dim
        num_bytes = sum(seq_len for _, seq_len in rows) * key_bytes(shape)
        num_bytes += 4 * sum(query_len for query_len, _ in rows) * shape.num_heads * shape.head_dim
        workload = make_workload(bench, shape, rows)
        seconds = bench.measure(workload.run)
        wanted = _WANTED_FLOPS / bench.ceilings.flops if query_len == seq_len == 8192 else None
        ours = Row(
            case=f"{shape.name}: {len(rows)} x {query_len} of {seq_len}",
            measured=seconds,
            floor=bench.floor.seconds(num_bytes, operations),
            target=wanted if shape.head_dim == 128 else None,
            facts={
                "tflop_per_s": round(operations / seconds / 1e12, 1),
                "error": float(f"{workload.error():.2g}"),
            },
        )
        yield ours
        yield from peer_rows(bench, workload, ours, operations / 1e12)
