"""Alternatives to the tuning table's tiles. A tile that does not fit on the device is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.attention import LLAMA_8B, TOY, Workload, make_workload
from benchmarks.gpu.models import Shape
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels.gpu.attention_decode import paged_attention_decode
from pagemill.kernels.gpu.attention_prefill import paged_attention_prefill
from pagemill.kernels.gpu.tuning import Tile, compute_capability, decode_tile, prefill_tile

DECODE_TILES = [
    Tile(16, block_n, num_warps, num_stages)
    for block_n, num_warps, num_stages in [
        (32, 4, 3), (32, 4, 5), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3),
    ]
]  # fmt: skip
PREFILL_TILES = [
    Tile(*numbers)
    for numbers in [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 8, 3), (128, 64, 4, 2), (128, 64, 8, 2),
        (128, 64, 8, 3), (128, 128, 8, 2),
    ]
]  # fmt: skip
_TOY_TILES = [Tile(16, 32, 4, 1)]
_LAYERS = 4  # of 64 MiB or more: together they are several times the L2 cache


def run(bench: Bench) -> Iterator[Row]:
    if bench.is_tiny:
        yield from timed_decode(bench, TOY, [(1, 40)], _TOY_TILES)
        yield from timed_prefill(bench, TOY, 24, _TOY_TILES)
    else:
        yield from timed_decode(bench, LLAMA_8B, [(1, 16384), (64, 2048)], DECODE_TILES)
        yield from timed_prefill(bench, LLAMA_8B, 4096, PREFILL_TILES)


def timed_decode(
    bench: Bench, shape: Shape, sizes: Sequence[tuple[int, int]], tiles: Sequence[Tile]
) -> Iterator[Row]:
    """`sizes`: (rows, keys of each)."""
    chosen = decode_tile(
        shape.head_dim, shape.num_heads // shape.num_kv_heads, 2, compute_capability(bench.device)
    )
    for batch, keys in sizes:
        workload = make_workload(bench, shape, [(1, keys)] * batch, num_layers=_LAYERS)
        for tile in tiles:
            # Bytes of every bf16 key and value once, and the operations on them.
            num_bytes = 4 * batch * keys * shape.num_kv_heads * shape.head_dim
            floor = bench.floor.seconds(num_bytes, 4 * batch * keys * shape.num_heads * shape.head_dim)
            call = _decode_call(workload, tile) if bench.face == "triton" else workload.run
            seconds, facts = _seconds(bench, call)
            yield Row(
                case=f"decode {batch} x {keys}: {_named(tile, chosen)}",
                measured=seconds and seconds / _LAYERS,
                floor=floor,
                facts=facts,
            )


def timed_prefill(bench: Bench, shape: Shape, length: int, tiles: Sequence[Tile]) -> Iterator[Row]:
    chosen = prefill_tile(shape.head_dim, 2, compute_capability(bench.device))
    workload = make_workload(bench, shape, [(length, length)])
    operations = 2 * length * (length + 1) * shape.num_heads * shape.head_dim
    for tile in tiles:
        call = _prefill_call(workload, tile) if bench.face == "triton" else workload.run
        seconds, facts = _seconds(bench, call)
        yield Row(
            case=f"prefill {length}: {_named(tile, chosen)}",
            measured=seconds,
            floor=bench.floor.seconds(0, operations),
            facts=facts,
        )


def _seconds(bench: Bench, run: Callable[[], None]) -> tuple[float | None, dict[str, str]]:
    try:
        return bench.measure(run), {}
    except OutOfResources as error:
        return None, {"why": str(error)}


def _named(tile: Tile, chosen: Tile) -> str:
    numbers = f"{tile.block_m} x {tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"
    return numbers + (" (in the table)" if tile == chosen else "")


def _decode_call(workload: Workload, tile: Tile) -> Callable[[], None]:
    out, metadata = torch.empty_like(workload.query), workload.metadata

    def run() -> None:
        for layer in workload.layers:
            paged_attention_decode(
                out,
                workload.query,
                layer,
                metadata.block_tables,
                metadata.seq_lens,
                workload.scoring,
                max_seq_len=metadata.max_seq_len,
                tile=tile,
            )

    return run


def _prefill_call(workload: Workload, tile: Tile) -> Callable[[], None]:
    out = torch.empty_like(workload.query)
    return lambda: paged_attention_prefill(
        out, workload.query, workload.layers[0], workload.metadata, workload.scoring, tile=tile
    )
