"""Decode attention over caches of fp8 and int8 beside bf16: half the bytes should take half the time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.gpu.attention import LLAMA_8B, TOY, key_bytes, make_workload, num_layers_of
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels.types.layer_cache import FP8

_TARGET = 0.85


def run(bench: Bench) -> Iterator[Row]:
    yield from _timed(bench, [(2, 32)] if bench.is_tiny else [(64, 2048), (256, 2048), (8, 16384)])


def compile_all(bench: Bench) -> Iterator[Row]:
    yield from _timed(bench, [(1, 1024), (256, 1024)])


def _timed(bench: Bench, sizes: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """`sizes`: (rows, keys of each)."""
    shape = TOY if bench.is_tiny else LLAMA_8B
    dtypes = [torch.bfloat16, torch.int8]
    if bench.device.type == "cpu" or torch.cuda.get_device_capability(bench.device) >= (8, 9):
        dtypes.append(FP8)
    for batch, keys in sizes:
        for dtype in dtypes:
            layer_bytes = batch * keys * key_bytes(shape, dtype)
            layers = num_layers_of(bench, layer_bytes)
            workload = make_workload(bench, shape, [(1, keys)] * batch, cache_dtype=dtype, num_layers=layers)
            seconds = bench.measure(workload.run) / layers
            operations = 4 * batch * keys * shape.num_heads * shape.head_dim
            expected = bench.expected
            share = expected.scaled_decode_attention if dtype.itemsize == 1 else expected.decode_attention
            yield Row(
                case=f"{str(dtype).removeprefix('torch.')}: {batch} x {keys}",
                measured=seconds,
                floor=bench.floor.seconds(layer_bytes, operations),
                prediction=expected.seconds(layer_bytes, operations, share=share),
                target=_TARGET,
                facts={"gb_per_s": round(layer_bytes / seconds / 1e9, 1)},
            )
