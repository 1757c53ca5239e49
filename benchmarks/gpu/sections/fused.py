"""Kernels that read rows and write rows: norms, activations, rotation with the cache's write, sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.row_kernels import COMPILED_SIZES, LLAMA_SIZES, TOY_SIZES, Sizes, projected, sampling_rows
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels import dispatch
from pagemill.kernels.types.layer_cache import allocate_layer

_TARGET = 0.8
# One set of logits at 256 rows is over twice the L2 cache. Those of few rows stay in it, as in an engine,
# where the previous matmul has just written them.
_ROWS = (256, 64, 8, 1)


def run(bench: Bench) -> Iterator[Row]:
    yield from timed(bench, TOY_SIZES if bench.is_tiny else LLAMA_SIZES)


def compile_all(bench: Bench) -> Iterator[Row]:
    """Compile the same kernels without the gigabytes."""
    yield from timed(bench, COMPILED_SIZES)


def timed(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=bench.device).bfloat16()

    x, residual = (draw(sizes.num_tokens, sizes.hidden_size) for _ in range(2))
    weight, gate_up = draw(sizes.hidden_size), draw(sizes.num_tokens, 2 * sizes.intermediate_size)
    query, key, value, rotation, slots = projected(bench.device, sizes, torch.bfloat16)
    blocks, shape = -(-sizes.num_tokens // 16) + 1, sizes.shape
    cache = allocate_layer(blocks, shape.num_kv_heads, 16, shape.head_dim, torch.bfloat16, bench.device)
    # Views of one projection, each read and written once.
    rotated_bytes = 4 * (query.numel() + key.numel() + value.numel())
    calls: list[tuple[str, int, Callable[[], object]]] = [
        ("rms_norm", 2 * x.nbytes, lambda: dispatch.rms_norm(x, weight, 1e-5)),
        ("add_rms_norm", 4 * x.nbytes, lambda: dispatch.add_rms_norm(x, residual, weight, 1e-5)),
        ("silu_and_mul", gate_up.nbytes * 3 // 2, lambda: dispatch.silu_and_mul(gate_up)),
        (
            "rotary_and_cache",
            rotated_bytes,
            lambda: dispatch.rotary_and_cache(query, key, value, rotation, cache, slots),
        ),
    ]
    for name, num_bytes, call in calls:
        with dispatch.override(bench.face):
            seconds = bench.measure(call)
        yield Row(
            case=name,
            measured=seconds,
            floor=bench.floor.seconds(num_bytes),
            target=_TARGET,
            facts={"gb_per_s": round(num_bytes / seconds / 1e9, 1)},
        )


def run_sampling(bench: Bench) -> Iterator[Row]:
    """Sample tokens for the rows of a step, with and without filters, compared with the sort that it replaces."""
    vocab_size = (TOY_SIZES if bench.is_tiny else LLAMA_SIZES).vocab_size
    for num_rows in (3,) if bench.is_tiny else _ROWS:
        logits = 3 * torch.randn(num_rows, vocab_size, device=bench.device)
        floor = bench.floor.seconds(logits.nbytes)
        yield from _drawn(bench, logits, "temperature alone")
        yield from _drawn(bench, logits, "top-k, top-p, min-p", has_filters=True)
        seconds = bench.measure(lambda logits=logits: logits.sort(dim=-1))  # type: ignore[misc]
        yield Row(case=f"{num_rows} rows, torch's sort", measured=seconds, floor=floor)


def _drawn(bench: Bench, logits: torch.Tensor, name: str, *, has_filters: bool = False) -> Iterator[Row]:
    peaks, rows = logits.amax(dim=-1), sampling_rows(bench.device, len(logits), filters=has_filters)
    with dispatch.override(bench.face):
        seconds = bench.measure(lambda: dispatch.sample_tokens(logits, peaks, rows, has_filters=has_filters))
    yield Row(
        case=f"{len(logits)} rows, {name}",
        measured=seconds,
        floor=bench.floor.seconds(logits.nbytes),
        facts={"gb_per_s": round(logits.nbytes / seconds / 1e9, 1)},
    )
