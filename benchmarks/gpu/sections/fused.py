"""Kernels that read rows and write rows: norms, activations, rotation with the cache's write."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.row_kernels import COMPILED_SIZES, LLAMA_SIZES, TOY_SIZES, Sizes, projected
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels import dispatch
from pagemill.kernels.types.layer_cache import allocate_layer

_TARGET = 0.8


def run(bench: Bench) -> Iterator[Row]:
    yield from timed(bench, TOY_SIZES if bench.is_tiny else LLAMA_SIZES)


def compile_all(bench: Bench) -> Iterator[Row]:
    """The same kernels, without the gigabytes."""
    yield from timed(bench, COMPILED_SIZES)


def timed(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=bench.device).bfloat16()

    x, residual = (draw(sizes.num_tokens, sizes.hidden_size) for _ in range(2))
    weight, gate_up = draw(sizes.hidden_size), draw(sizes.num_tokens, 2 * sizes.intermediate_size)
    query, key, value, rotation, slots = projected(bench.device, sizes, torch.bfloat16)
    blocks, shape = -(-sizes.num_tokens // 16) + 1, sizes.shape
    cache = allocate_layer(blocks, shape.num_kv_heads, 16, shape.head_dim, torch.bfloat16, bench.device)
    # Views of one projection: their own bytes, each read and written once.
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
            prediction=bench.expected.seconds(num_bytes, share=bench.expected.rows),
            target=_TARGET,
            facts={"gb_per_s": round(num_bytes / seconds / 1e9, 1)},
        )
