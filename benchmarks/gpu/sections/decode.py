"""Decode attention: seconds of a layer compared with the lower bound for its keys' and values' bytes.

Three sections: rows of one length, rows of unlike lengths, and caches of 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.attention import (
    FALCON_7B,
    LLAMA_8B,
    QWEN_600M,
    TOY,
    key_bytes,
    make_workload,
    num_layers_of,
    peer_rows,
)
from benchmarks.gpu.models import Shape
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels.types.layer_cache import FP8

SHAPES = (LLAMA_8B, QWEN_600M, FALCON_7B)
BLOCK_SIZES = (16, 64)
_LARGEST_CACHE_BYTES = 40 * 2**30
_LONG = 2048
_TARGET = 0.85
"""For `_LONG` keys and more, where the device is full."""


def run(bench: Bench) -> Iterator[Row]:
    if bench.is_tiny:
        yield from timed(bench, (TOY,), (16,), [(2, 32)])
    else:
        sizes = product((1, 8, 64, 256), (256, 1024, 4096, 16384))
        yield from timed(bench, SHAPES, BLOCK_SIZES, list(sizes))


def run_headline(bench: Bench) -> Iterator[Row]:
    """Run one model and block size."""
    sizes = [(1, 1024), (1, 16384), (8, 4096), (64, 1024), (64, 4096), (256, 256), (256, 1024), (256, 4096)]
    yield from timed(
        bench, (TOY,) if bench.is_tiny else (LLAMA_8B,), (16,), [(2, 32)] if bench.is_tiny else sizes
    )


def timed(
    bench: Bench, shapes: Sequence[Shape], block_sizes: Sequence[int], sizes: Sequence[tuple[int, int]]
) -> Iterator[Row]:
    """`sizes`: (rows, keys of each)."""
    for shape, block_size, (batch, keys) in product(shapes, block_sizes, sizes):
        layer_bytes = batch * keys * key_bytes(shape)
        if layer_bytes * num_layers_of(bench, layer_bytes) > _LARGEST_CACHE_BYTES:
            continue
        case = f"{shape.name}, blocks of {block_size}: {batch} x {keys}"
        target = _TARGET if keys >= _LONG and batch >= 8 else None
        yield from _rows(bench, shape, case, [keys] * batch, target, block_size=block_size)


def run_ragged(bench: Bench) -> Iterator[Row]:
    """One long row among short ones should cost no more than its bytes."""
    short, spread = [1024] * 64, [256 * (number + 1) for number in range(64)]
    cases = {
        "64 x 1,024": short,
        "1 x 16,384": [16384],
        "64 x 1,024 and 1 x 16,384": [*short, 16384],
        "64 from 256 to 16,384": spread,
    }
    shape = TOY if bench.is_tiny else LLAMA_8B
    for case, lengths in ({"4 x 8 and 1 x 100": [8] * 4 + [100]} if bench.is_tiny else cases).items():
        yield from _rows(bench, shape, case, lengths, _TARGET if len(lengths) > 1 else None)


def run_fp8_kv(bench: Bench) -> Iterator[Row]:
    """Half the bytes of bf16 should need half the time."""
    yield from timed_dtypes(bench, [(2, 32)] if bench.is_tiny else [(64, 2048), (256, 2048), (8, 16384)])


def timed_dtypes(bench: Bench, sizes: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """`sizes`: (rows, keys of each)."""
    dtypes = [torch.bfloat16, torch.int8]
    if bench.device.type == "cpu" or torch.cuda.get_device_capability(bench.device) >= (8, 9):
        dtypes.append(FP8)
    for (batch, keys), dtype in product(sizes, dtypes):
        case = f"{str(dtype).removeprefix('torch.')}: {batch} x {keys}"
        shape = TOY if bench.is_tiny else LLAMA_8B
        yield from _rows(bench, shape, case, [keys] * batch, _TARGET, cache_dtype=dtype)


def _rows(
    bench: Bench, shape: Shape, case: str, lengths: Sequence[int], target: float | None, *,
    cache_dtype: torch.dtype = torch.bfloat16, **options: Any,
) -> Iterator[Row]:  # fmt: skip
    """Rows of `lengths` keys. Library results follow if blocks have the default size."""
    layer_bytes = sum(lengths) * key_bytes(shape, cache_dtype)
    layers = num_layers_of(bench, layer_bytes)
    rows = [(1, keys) for keys in lengths]
    workload = make_workload(bench, shape, rows, cache_dtype=cache_dtype, num_layers=layers, **options)
    seconds = bench.measure(workload.run) / layers
    operations = 4 * sum(lengths) * shape.num_heads * shape.head_dim
    ours = Row(
        case=case,
        measured=seconds,
        floor=bench.floor.seconds(layer_bytes, operations),
        target=target,
        facts={
            "gb_per_s": round(layer_bytes / seconds / 1e9, 1),
            "error": float(f"{workload.error():.2g}"),
        },
    )
    yield ours
    if workload.layers[0].block_size == BLOCK_SIZES[0]:
        yield from peer_rows(bench, workload, ours, layer_bytes / 1e9)
