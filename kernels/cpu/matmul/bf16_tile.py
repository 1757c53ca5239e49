"""Tiles of a product of bfloat16 numbers: some converted rows times one panel, the sums in registers all the while.

AVX-512 BF16 multiplies pairs of inputs and adds both products to an fp32 sum, the second one first, each addition
rounded to nearest. So each number of a tile is one chain of fp32 additions in a fixed order, and tiles of different
heights, or made of ordinary multiply-adds, agree to the last bit; but for numbers below 2^-126, which are zeros to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import compiles_for, external, prefetch_line
from pagemill.kernels.cpu.jit.row import F32, I32, VECTOR
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call, emit_splat
from pagemill.kernels.cpu.matmul.fp32_tile import CUT, PANEL, Cut, by_height

GROUP = 32
"""Inputs of a row that fill a cache line. Zeros fill up the last one."""
PAIR = 2
PAIRS = GROUP // PAIR
BF16 = 2  # bytes
ROW_BYTES = GROUP * BF16
"""Of a row's part of a group. The parts of a tile's rows lie beside each other, group by group."""
PANEL_BYTES = PANEL * GROUP * BF16
"""Of a panel's part of a group: pair by pair, and of each the channels."""

_ir = cgutils.ir
_I32 = _ir.IntType(32)
_I32X16 = _ir.VectorType(_I32, LANES)

Dots = Callable[[Any, Any, Any, Any], Any]
"""dots(builder, sums, weights, numbers): emits sums + the products of both numbers of each pair, all of [LANES]."""


def native_dots(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """By AVX-512 BF16."""
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, [sums, weights, numbers])


def plain_dots(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """By two multiply-adds, the second number's first: for any CPU, slowly."""

    def wide(pairs: Any, place: int) -> Any:
        if place == 0:
            bits = builder.shl(pairs, _ir.Constant(_I32X16, [16] * LANES))
        else:
            bits = builder.and_(pairs, _ir.Constant(_I32X16, [-(1 << 16)] * LANES))
        return builder.bitcast(bits, F32X16)

    for place in (1, 0):
        sums = call(builder, "llvm.fma.v16f32", F32X16, [wide(weights, place), wide(numbers, place), sums])
    return sums


IS_NATIVE = compiles_for("avx512bf16") and compiles_for("avx512f")


class _Tile:
    """Emits a tile of some height, one of the passes of a panel's halves after the other."""

    def __init__(self, dots: Dots, builder: Any, num_rows: int, arguments: list[Any]) -> None:
        self._dots, self._builder, self._num_rows = dots, builder, num_rows
        self._sums, self._rows, self._panel, self._num_groups, self._ahead, self._ahead_step = arguments

    def emit(self, halves: range) -> None:
        builder, int64 = self._builder, self._sums.type
        places = [[PANEL * F32 * row + VECTOR * half for half in halves] for row in range(self._num_rows)]
        totals = [
            [
                cgutils.alloca_once_value(builder, builder.load(self._at(F32X16, self._sums, place), align=4))
                for place in row
            ]
            for row in places
        ]
        with cgutils.for_range(builder, self._num_groups, intp=int64) as groups:
            rows = builder.add(self._rows, builder.mul(groups.index, int64(self._num_rows * ROW_BYTES)))
            weights = builder.add(self._panel, builder.mul(groups.index, int64(PANEL_BYTES)))
            first = builder.mul(groups.index, int64(PAIRS))
            with cgutils.for_range(builder, int64(PAIRS), intp=int64) as pairs:
                if halves[0] == 0:
                    index = builder.add(first, pairs.index)
                    prefetch_line(builder, builder.add(self._ahead, builder.mul(index, self._ahead_step)))
                self._add_pair(pairs.index, rows, weights, halves, totals)
        for row_places, row_totals in zip(places, totals, strict=True):
            for place, total in zip(row_places, row_totals, strict=True):
                builder.store(builder.load(total), self._at(F32X16, self._sums, place), align=4)

    def _at(self, kind: Any, address: Any, distance: int) -> Any:
        builder = self._builder
        return builder.inttoptr(builder.add(address, address.type(distance)), kind.as_pointer())

    def _add_pair(self, index: Any, rows: Any, weights: Any, halves: range, totals: list[list[Any]]) -> None:
        builder = self._builder
        panel = builder.add(weights, builder.mul(index, index.type(PANEL * PAIR * BF16)))
        vectors = [builder.load(self._at(_I32X16, panel, VECTOR * half), align=4) for half in halves]
        numbers = builder.add(rows, builder.mul(index, index.type(I32)))
        for row, row_totals in enumerate(totals):
            pair = emit_splat(builder, builder.load(self._at(_I32, numbers, ROW_BYTES * row), align=4))
            for vector, total in zip(vectors, row_totals, strict=True):
                builder.store(self._dots(builder, builder.load(total), vector, pair), total)


def make_tile(dots: Dots, cut: Cut) -> Any:
    """An intrinsic: sums[r, 0..PANEL) += rows[r] @ panel for 1 to `cut.most_rows` rows.

    With every pair of inputs it asks for the cache line at `ahead`, `ahead_step` bytes further each time.
    """

    def body(builder: Any, num_rows: int, arguments: list[Any]) -> None:
        tile = _Tile(dots, builder, num_rows, arguments)
        for halves in cut.passes():
            tile.emit(halves)

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
        return by_height(range(1, cut.most_rows + 1), 7, body)

    return intrinsic(tile)


_tile = make_tile(native_dots if IS_NATIVE else plain_dots, CUT)


@external
def multiply_tile(num_rows, sums, rows, panel, num_groups, ahead, ahead_step):
    """`make_tile` for this CPU."""
    _tile(num_rows, sums, rows, panel, num_groups, ahead, ahead_step)
