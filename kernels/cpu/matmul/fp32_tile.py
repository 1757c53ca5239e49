"""Tiles of a matmul with packed weights: some rows of x times one panel, with all sums in registers.

Each value of a tile is one chain of fused multiply-adds over the inputs in order. Tiles of different heights,
and of x in either layout, therefore agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import compiles_for, external, jit, prefetch_line
from pagemill.kernels.cpu.jit.row import F32, VECTOR
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call, emit_splat

PANEL = 2 * LANES  # output channels


class Cut(NamedTuple):
    """The tile shape for a CPU's registers: maximum number of rows, and panel halves computed together."""

    most_rows: int
    halves: int

    def passes(self) -> list[range]:
        """Return the halves of a panel that each pass computes."""
        return [range(first, first + self.halves) for first in range(0, 2, self.halves)]


WIDE = Cut(14, 2)  # 28 sums, 2 vectors of weights and a value of x fill the 32 registers of AVX-512
NARROW = Cut(6, 1)  # 6 sums and a vector of weights, two registers each, and a value of x: 15 of AVX2's 16
CUT = WIDE if compiles_for("avx512f") else NARROW
MOST_ROWS = CUT.most_rows

_ir = cgutils.ir

Body = Callable[[Any, int, list[Any]], None]
"""body(builder, num_rows, the intrinsic's arguments after the number of rows): emits a tile of that height."""


def _vector(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, F32X16.as_pointer())


def _load(builder: Any, address: Any) -> Any:
    return builder.load(_vector(builder, address), align=4)


def _broadcast(builder: Any, address: Any) -> Any:
    """Load the value at `address` into every lane."""
    number = builder.load(builder.inttoptr(address, _ir.FloatType().as_pointer()), align=4)
    return emit_splat(builder, number)


def _rows_from(builder: Any, first: Any, stride: Any, num_rows: int) -> list[Any]:
    return [builder.add(first, builder.mul(stride, first.type(row))) for row in range(num_rows)]


def _add_input(
    builder: Any, weights: Any, halves: range, ahead: Any, numbers: list[Any], sums: list[list[Any]]
) -> None:
    """sums[r] += numbers[r] * weights, for one input and these halves of a panel. All but the sums are addresses."""
    vectors = [_load(builder, builder.add(weights, weights.type(VECTOR * half))) for half in halves]
    if halves[0] == 0:
        prefetch_line(builder, ahead)
    for number, totals in zip(numbers, sums, strict=True):
        factor = _broadcast(builder, number)
        for vector, total in zip(vectors, totals, strict=True):
            operands = [factor, vector, builder.load(total)]
            builder.store(call(builder, "llvm.fma.v16f32", F32X16, operands), total)


def prefetch_row(builder: Any, ahead: Any, step: Any, row: Any, halves: range) -> None:
    """Emit a prefetch of these halves of a panel's row, whose lines are `step` bytes apart from `ahead`."""
    for half in halves:
        line = builder.add(builder.mul(row, row.type(2)), row.type(half))
        prefetch_line(builder, builder.add(ahead, builder.mul(line, step)))


class Rows(NamedTuple):
    """The layout of rows of PANEL values, in bytes: first row, distance of rows, and distance of their halves."""

    first: Any
    stride: Any
    half: Any


@contextmanager
def summed(builder: Any, num_rows: int, halves: range, out: Rows, start: Rows) -> Iterator[list[list[Any]]]:
    """Sums of these halves of a panel, loaded from `start` and stored to `out`."""

    def addresses(rows: Rows) -> list[list[Any]]:
        firsts = _rows_from(builder, rows.first, rows.stride, num_rows)
        return [
            [builder.add(first, builder.mul(rows.half, rows.half.type(half))) for half in halves]
            for first in firsts
        ]

    sums = [
        [cgutils.alloca_once_value(builder, _load(builder, address)) for address in row]
        for row in addresses(start)
    ]
    yield sums
    for totals, row in zip(sums, addresses(out), strict=True):
        for total, address in zip(totals, row, strict=True):
            builder.store(builder.load(total), _vector(builder, address), align=4)


def by_height(heights: range, num_arguments: int, body: Body) -> Any:
    """Return the generator of an intrinsic that jumps to the tile with the number of rows in its first argument."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        count, *rest = arguments
        done = builder.append_basic_block("done")
        switch = builder.switch(count, done)
        for height in heights:
            case = builder.append_basic_block(f"rows{height}")
            switch.add_case(count.type(height), case)
            builder.position_at_end(case)
            body(builder, height, rest)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * num_arguments), generate


def _strided_body(cut: Cut) -> Body:
    def emit(builder: Any, num_rows: int, arguments: list[Any]) -> None:
        out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, ahead_step = arguments
        int64 = out.type
        rows, half = _rows_from(builder, x, x_stride, num_rows), int64(VECTOR)
        to, origin = Rows(out, out_stride, half), Rows(start, start_stride, half)
        for halves in cut.passes():
            with (
                summed(builder, num_rows, halves, to, origin) as sums,
                cgutils.for_range(builder, depth, intp=int64) as loop,
            ):
                distance = builder.mul(loop.index, int64(F32))
                weights = builder.add(panel, builder.mul(loop.index, int64(F32 * PANEL)))
                line = builder.add(ahead, builder.mul(loop.index, ahead_step))
                numbers = [builder.add(row, distance) for row in rows]
                _add_input(builder, weights, halves, line, numbers, sums)

    return emit


def _lined_body(cut: Cut) -> Body:
    def emit(builder: Any, num_rows: int, arguments: list[Any]) -> None:
        x, panel, num_lines, ahead, ahead_step = arguments[6:]
        int64 = x.type
        to, origin = Rows(*arguments[:3]), Rows(*arguments[3:6])
        for halves in cut.passes():
            with (
                summed(builder, num_rows, halves, to, origin) as sums,
                cgutils.for_range(builder, num_lines, intp=int64) as line,
            ):
                lines = builder.add(x, builder.mul(line.index, int64(num_rows * VECTOR)))
                first = builder.mul(line.index, int64(LANES))
                with cgutils.for_range(builder, int64(LANES), intp=int64) as loop:
                    number = builder.add(lines, builder.mul(loop.index, int64(F32)))
                    index = builder.add(first, loop.index)
                    weights = builder.add(panel, builder.mul(index, int64(F32 * PANEL)))
                    next_line = builder.add(ahead, builder.mul(index, ahead_step))
                    numbers = [builder.add(number, int64(row * VECTOR)) for row in range(num_rows)]
                    _add_input(builder, weights, halves, next_line, numbers, sums)

    return emit


@jit
def num_tiles_of(num_rows):
    return (num_rows + MOST_ROWS - 1) // MOST_ROWS


@jit
def first_row(tile, num_rows):
    """Return the first row of a tile; past the last tile, the end. Tiles have nearly equal height."""
    return num_rows * tile // num_tiles_of(num_rows)


def make_tile(cut: Cut) -> Any:
    """Return an intrinsic: out[r, 0..PANEL) = start[r] + x[r] @ panel for 1 to `cut.most_rows` rows.

    It uses `depth` inputs. Strides are in bytes. For every input it prefetches the cache line at `ahead`,
    which advances by `ahead_step`.
    """

    def tile(
        typing_context: Any,
        num_rows: Any,
        out: Any,
        out_stride: Any,
        x: Any,
        x_stride: Any,
        panel: Any,
        start: Any,
        start_stride: Any,
        depth: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        return by_height(range(1, cut.most_rows + 1), 11, _strided_body(cut))

    return intrinsic(tile)


def make_lined_tile(cut: Cut) -> Any:
    """`make_tile` for x as [num_lines, num_rows, LANES]: one cache line of each row, then the next of each.

    x is then one stream, and every value is at a fixed distance from one address. Rows far apart need an
    address register each, of which there are too few, and can map to the same cache lines. The two halves of
    a row of `out` are `out_half` bytes apart, so a result can be such an x; the same applies to `start`.
    """

    def tile(
        typing_context: Any,
        num_rows: Any,
        out: Any,
        out_stride: Any,
        out_half: Any,
        start: Any,
        start_stride: Any,
        start_half: Any,
        x: Any,
        panel: Any,
        num_lines: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        return by_height(range(1, cut.most_rows + 1), 12, _lined_body(cut))

    return intrinsic(tile)


_tile, _lined_tile = make_tile(CUT), make_lined_tile(CUT)


@external
def multiply_tile(
    num_rows, out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, ahead_step
):
    """`make_tile` for this CPU."""
    _tile(num_rows, out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, ahead_step)


@external
def multiply_lined_tile(
    num_rows,
    out,
    out_stride,
    out_half,
    start,
    start_stride,
    start_half,
    x,
    panel,
    num_lines,
    ahead,
    ahead_step,
):
    """`make_lined_tile` for this CPU."""
    _lined_tile(
        num_rows,
        out,
        out_stride,
        out_half,
        start,
        start_stride,
        start_half,
        x,
        panel,
        num_lines,
        ahead,
        ahead_step,
    )
