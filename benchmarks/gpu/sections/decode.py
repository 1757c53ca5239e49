"""Decode attention: bytes of keys and values per second beside the measured copy bandwidth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.gpu.attention import (
    FALCON_7B,
    LLAMA_8B,
    QWEN_600M,
    TOY,
    key_bytes,
    make_workload,
    num_layers_of,
)
from benchmarks.gpu.models import Shape
from benchmarks.gpu.section import Bench, Row

SHAPES = (LLAMA_8B, QWEN_600M, FALCON_7B)
BLOCK_SIZES = (16, 64)
_LARGEST_CACHE_BYTES = 40 * 2**30
_LONG = 2048
_TARGET = 0.85
"""From `_LONG` keys on, where the device is full."""


def run(bench: Bench) -> Iterator[Row]:
    if bench.is_tiny:
        yield from timed(bench, (TOY,), (16,), [(2, 32)])
    else:
        sizes = product((1, 8, 64, 256), (256, 1024, 4096, 16384))
        yield from timed(bench, SHAPES, BLOCK_SIZES, list(sizes))


def timed(
    bench: Bench, shapes: Sequence[Shape], block_sizes: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> Iterator[Row]:
    """`sizes`: (rows, keys of each)."""
    for shape, block_size, (batch, keys) in product(shapes, block_sizes, sizes):
        layer_bytes = batch * keys * key_bytes(shape)
        layers = num_layers_of(bench, layer_bytes)
        if layer_bytes * layers > _LARGEST_CACHE_BYTES:
            continue
        workload = make_workload(bench, shape, [(1, keys)] * batch, block_size=block_size, num_layers=layers)
        seconds = bench.measure(workload.run) / layers
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        yield Row(
            case=f"{shape.name}, blocks of {block_size}: {batch} x {keys}",
            measured=seconds,
            floor=bench.floor.decode(*heads, [keys] * batch),
            prediction=bench.expected.decode(*heads, [keys] * batch),
            target=_TARGET if keys >= _LONG and batch >= 8 else None,
            facts={"gb_per_s": round(layer_bytes / seconds / 1e9, 1)},
        )
