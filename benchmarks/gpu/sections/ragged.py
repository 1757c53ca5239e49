"""Decode attention over rows of unlike lengths: one long row among short ones should cost its bytes and no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.gpu.attention import LLAMA_8B, TOY, key_bytes, make_workload, num_layers_of
from benchmarks.gpu.models import Shape
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels.gpu.tuning import compute_capability, decode_tile, multiprocessors

_TARGET = 0.85


def run(bench: Bench) -> Iterator[Row]:
    if bench.is_tiny:
        yield _timed(bench, TOY, "4 x 8 and 1 x 100", [8] * 4 + [100])
        return
    short, spread = [1024] * 64, [256 * (number + 1) for number in range(64)]
    yield _timed(bench, LLAMA_8B, "64 x 1,024", short)
    yield _timed(bench, LLAMA_8B, "1 x 16,384", [16384])
    yield _timed(bench, LLAMA_8B, "64 x 1,024 and 1 x 16,384", [*short, 16384])
    yield _timed(bench, LLAMA_8B, "64 from 256 to 16,384", spread)


def _timed(bench: Bench, shape: Shape, case: str, seq_lens: Sequence[int]) -> Row:
    layer_bytes = sum(seq_lens) * key_bytes(shape)
    layers = num_layers_of(bench, layer_bytes)
    workload = make_workload(bench, shape, [(1, keys) for keys in seq_lens], num_layers=layers)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    group = shape.num_heads // shape.num_kv_heads
    tile = decode_tile(shape.head_dim, group, torch.bfloat16.itemsize, compute_capability(bench.device))
    in_series = bench.expected.series(
        seq_lens, shape.num_kv_heads, tile.block_n, multiprocessors(bench.device)
    )
    seconds = bench.measure(workload.run) / layers
    return Row(
        case=case,
        measured=seconds,
        floor=bench.floor.decode(*heads, seq_lens),
        prediction=max(in_series, bench.expected.decode(*heads, seq_lens)),
        target=_TARGET if len(seq_lens) > 1 else None,
        facts={
            "gb_per_s": round(layer_bytes / seconds / 1e9, 1),
            "layers_of_8b_ms": round(seconds * 32e3, 3),
        },
    )
