"""Tiles of a product of 8-bit integers: some quantised rows times one panel, the sums in registers all the while.

AVX-512 VNNI multiplies unsigned by signed bytes. Weights are the unsigned ones, 128 too large, which adds 128 times
the sum of the row's group to every channel alike: sums start from that number with its sign turned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu_jit import compiles_for, prefetch_line
from kernels.cpu_matmul_tile import MOST_ROWS, PANEL, Body, by_height
from kernels.cpu_row import F32, I32, VECTOR
from kernels.cpu_vector import F32X16, LANES, call, emit_splat
from kernels.grouped_int8 import GROUP

ZERO_POINT = 128  # the byte of a weight of 0
QUAD = 4  # inputs that one instruction adds up
QUADS = GROUP // QUAD
# A panel's part of a group: the weights, quad by quad and then channel by channel; then the channels' scales.
WEIGHT_BYTES = PANEL * GROUP
PANEL_BYTES = WEIGHT_BYTES + PANEL * F32
# A row's part of a group: the numbers, their scale, and what the channels' sums start from. The parts of a tile's rows
# lie beside each other, group by group: each number is then at a fixed distance from one address. Rows far apart would
# take a register each for theirs, of which there are too few.
ROW_SCALE, ROW_START = GROUP, GROUP + F32
ROW_BYTES = GROUP + F32 + I32

_ir = cgutils.ir
_I32, _F32 = _ir.IntType(32), _ir.FloatType()
_I32X16 = _ir.VectorType(_I32, LANES)
_HALVES = (0, VECTOR)  # of a panel's channels, in bytes

MultiplyQuads = Callable[[Any, Any, Any, Any], Any]
"""multiply_quads(builder, sums, weights, numbers): emits sums + each lane's four unsigned times four signed bytes."""


def has_byte_products() -> bool:
    """Whether kernels are compiled for a CPU that multiplies bytes (AVX-512 VNNI); elsewhere they are slower."""
    return compiles_for("avx512vnni")


def multiply_bytes(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """By VNNI."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _I32X16, [sums, weights, numbers])


def multiply_parts(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """The same on any CPU."""

    def bits(count: int) -> Any:
        return _ir.Constant(_I32X16, [count] * LANES)

    for quarter in range(0, 32, 8):
        weight = builder.lshr(builder.shl(weights, bits(24 - quarter)), bits(24))
        number = builder.ashr(builder.shl(numbers, bits(24 - quarter)), bits(24))
        sums = builder.add(sums, builder.mul(weight, number))
    return sums


def _body(multiply_quads: MultiplyQuads) -> Body:
    def emit(builder: Any, num_rows: int, arguments: list[Any]) -> None:
        sums, rows, panel, num_groups, ahead, ahead_step = arguments
        int64 = sums.type

        def load(kind: Any, address: Any, distance: int = 0) -> Any:
            at = builder.inttoptr(builder.add(address, int64(distance)), kind.as_pointer())
            return builder.load(at, align=4)

        distances = [ROW_BYTES * row for row in range(num_rows)]
        totals = [[cgutils.alloca_once(builder, _I32X16) for _ in _HALVES] for _ in distances]
        with cgutils.for_range(builder, num_groups, intp=int64) as groups:
            parts = builder.add(rows, builder.mul(groups.index, int64(num_rows * ROW_BYTES)))
            weights = builder.add(panel, builder.mul(groups.index, int64(PANEL_BYTES)))
            first_quad = builder.mul(groups.index, int64(QUADS))
            for distance, row_totals in zip(distances, totals, strict=True):
                for total in row_totals:
                    builder.store(emit_splat(builder, load(_I32, parts, distance + ROW_START)), total)
            with cgutils.for_range(builder, int64(QUADS), intp=int64) as quads:
                quad = builder.add(weights, builder.mul(quads.index, int64(PANEL * QUAD)))
                vectors = [load(_I32X16, quad, half) for half in _HALVES]
                index = builder.add(first_quad, quads.index)
                prefetch_line(builder, builder.add(ahead, builder.mul(index, ahead_step)))
                numbers = builder.add(parts, builder.mul(quads.index, int64(QUAD)))
                for distance, row_totals in zip(distances, totals, strict=True):
                    number = emit_splat(builder, load(_I32, numbers, distance))
                    for weight, total in zip(vectors, row_totals, strict=True):
                        builder.store(multiply_quads(builder, builder.load(total), weight, number), total)
            scales = [load(F32X16, weights, WEIGHT_BYTES + half) for half in _HALVES]
            for row, (distance, row_totals) in enumerate(zip(distances, totals, strict=True)):
                row_scale = emit_splat(builder, load(_F32, parts, distance + ROW_SCALE))
                for half, scale, total in zip(_HALVES, scales, row_totals, strict=True):
                    target = builder.add(sums, int64(row * PANEL * F32 + half))
                    operands = [
                        builder.sitofp(builder.load(total), F32X16),
                        builder.fmul(scale, row_scale),
                        load(F32X16, target),
                    ]
                    added = call(builder, "llvm.fma.v16f32", F32X16, operands)
                    builder.store(added, builder.inttoptr(target, F32X16.as_pointer()), align=4)

    return emit


def make_tile(multiply_quads: MultiplyQuads, heights: range = range(1, MOST_ROWS + 1)) -> Any:
    """An intrinsic: sums[r, 0..PANEL) += rows[r] @ panel for a tile of as many rows as `heights` allows.

    With every quad of inputs it asks for the cache line at `ahead`, `ahead_step` bytes further each time.
    """

    def tile(
        typing_context: Any,
        num_rows: Any,
        sums: Any,
        rows: Any,
        panel: Any,
        num_groups: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        return by_height(heights, 7, _body(multiply_quads))

    return intrinsic(tile)


multiply_tile = make_tile(multiply_bytes if has_byte_products() else multiply_parts)
