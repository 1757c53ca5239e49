"""Prefill attention: operations of visible keys; beside it torch's own attention without paging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
import torch.nn.functional as F

from benchmarks.gpu.attention import GEMMA_2B, LLAMA_8B, QWEN_600M, TOY, key_bytes, make_workload
from benchmarks.gpu.floors import visible_keys
from benchmarks.gpu.models import Shape
from benchmarks.gpu.section import Bench, Row

SHAPES = (LLAMA_8B, QWEN_600M, GEMMA_2B)
BATCHES = (
    [(512, 512)],
    [(2048, 2048)],
    [(8192, 8192)],
    [(16384, 16384)],
    [(2048, 16384)],
    [(1024, 1024)] * 8,
)
_WANTED_FLOPS = 400e12
"""Causal, at 8,192 tokens and 128 dims."""


def run(bench: Bench) -> Iterator[Row]:
    if bench.is_tiny:
        yield from timed(bench, (TOY,), [[(16, 16)], [(4, 20)]])
    else:
        yield from timed(bench, SHAPES, BATCHES)


def timed(bench: Bench, shapes: Sequence[Shape], batches: Sequence[list[tuple[int, int]]]) -> Iterator[Row]:
    """`batches`: (query length, sequence length) of each row."""
    for shape, rows in product(shapes, batches):
        query_len, seq_len = rows[0]
        operations = 4 * visible_keys(rows) * shape.num_heads * shape.head_dim
        num_bytes = sum(seq_len for _, seq_len in rows) * key_bytes(shape)
        num_bytes += 4 * sum(query_len for query_len, _ in rows) * shape.num_heads * shape.head_dim
        seconds = bench.measure(make_workload(bench, shape, rows).run)
        facts = {"tflop_per_s": round(operations / seconds / 1e12, 1)}
        if query_len == seq_len:
            dense = bench.measure(_dense(bench, shape, len(rows), query_len))
            facts["torch_tflop_per_s"] = round(operations / dense / 1e12, 1)
        wanted = _WANTED_FLOPS / bench.ceilings.flops if query_len == seq_len == 8192 else None
        yield Row(
            case=f"{shape.name}: {len(rows)} x {query_len} of {seq_len}",
            measured=seconds,
            floor=bench.floor.seconds(num_bytes, operations),
            prediction=bench.expected.seconds(num_bytes, operations, share=bench.expected.prefill_attention),
            target=wanted if shape.head_dim == 128 else None,
            facts=facts,
        )


def _dense(bench: Bench, shape: Shape, batch: int, length: int) -> Callable[[], torch.Tensor]:
    def random(num_heads: int) -> torch.Tensor:
        size = (batch, num_heads, length, shape.head_dim)
        return torch.empty(size, dtype=torch.bfloat16, device=bench.device).normal_()

    query, key, value = random(shape.num_heads), random(shape.num_kv_heads), random(shape.num_kv_heads)
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
