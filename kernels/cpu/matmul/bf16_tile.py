"""Tiles of a bfloat16 matmul: some converted rows times one panel, with all sums in registers.

AVX-512 BF16 multiplies pairs of inputs and adds both products to an fp32 sum, the second one first. Each
addition is rounded to nearest. Each value of a tile is therefore one chain of fp32 additions in a fixed
order. Tiles of different heights, or made of ordinary multiply-adds, agree to the last bit, except that
AVX-512 BF16 treats values below 2^-126 as zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import compiles_for, external, jit
from pagemill.kernels.cpu.jit.row import F32, I32, VECTOR
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call, emit_splat
from pagemill.kernels.cpu.matmul.fp32_tile import CUT, PANEL, Cut, Rows, by_height, prefetch_row, summed

GROUP = 32
"""Inputs of a row that fill a cache line. The last line is padded with zeros."""
PAIR = 2
PAIRS = GROUP // PAIR
BF16 = 2  # bytes
ROW_BYTES = GROUP * BF16
"""Bytes of a row's part of a group. The parts of a tile's rows are adjacent, group by group."""
PANEL_BYTES = PANEL * GROUP * BF16
"""Bytes of a panel's part of a group, ordered by pair, then by channel."""

_ir = cgutils.ir
_I32 = _ir.IntType(32)
_I32X16 = _ir.VectorType(_I32, LANES)

Dots = Callable[[Any, Any, Any, Any], Any]
"""dots(builder, sums, weights, numbers): emits sums + the products of both values of each pair, all of [LANES]."""


def native_dots(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """Emit AVX-512 BF16 dot products."""
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", F32X16, [sums, weights, numbers])


def plain_dots(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """Emit two multiply-adds, the second value's first: for any CPU, slowly."""

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


def _emit_tile(dots: Dots, builder: Any, num_rows: int, arguments: list[Any], halves: range) -> None:
    """Emit a tile of some height: one pass over a panel's halves."""
    x, panel, num_groups, ahead, ahead_step = arguments[6:]
    int64 = x.type
    with (
        summed(builder, num_rows, halves, Rows(*arguments[:3]), Rows(*arguments[3:6])) as sums,
        cgutils.for_range(builder, num_groups, intp=int64) as groups,
    ):
        rows = builder.add(x, builder.mul(groups.index, int64(num_rows * ROW_BYTES)))
        weights = builder.add(panel, builder.mul(groups.index, int64(PANEL_BYTES)))
        first = builder.mul(groups.index, int64(PAIRS))
        with cgutils.for_range(builder, int64(PAIRS), intp=int64) as pairs:
            prefetch_row(builder, ahead, ahead_step, builder.add(first, pairs.index), halves)
            at = builder.add(weights, builder.mul(pairs.index, int64(PANEL * PAIR * BF16)))
            vectors = [_load(builder, _I32X16, at, VECTOR * half) for half in halves]
            numbers = builder.add(rows, builder.mul(pairs.index, int64(I32)))
            for row, totals in enumerate(sums):
                pair = emit_splat(builder, _load(builder, _I32, numbers, ROW_BYTES * row))
                for vector, total in zip(vectors, totals, strict=True):
                    builder.store(dots(builder, builder.load(total), vector, pair), total)


def _load(builder: Any, kind: Any, address: Any, distance: int) -> Any:
    at = builder.add(address, address.type(distance))
    return builder.load(builder.inttoptr(at, kind.as_pointer()), align=4)


def make_tile(dots: Dots, cut: Cut) -> Any:
    """Return an intrinsic: out[r, 0..PANEL) = start[r] + rows[r] @ panel for 1 to `cut.most_rows` rows.

    Its arguments are those of `fp32_tile.make_lined_tile`, where a line is a group. For every cache line of
    the panel it prefetches the one at `ahead`, which advances by `ahead_step` bytes.
    """

    def body(builder: Any, num_rows: int, arguments: list[Any]) -> None:
        for halves in cut.passes():
            _emit_tile(dots, builder, num_rows, arguments, halves)

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
        num_groups: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        return by_height(range(1, cut.most_rows + 1), 12, body)

    return intrinsic(tile)


_tile = make_tile(native_dots if IS_NATIVE else plain_dots, CUT)


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
    num_groups,
    ahead,
    ahead_step,
):
    """`make_tile` for this CPU."""
    _tile(
        num_rows,
        out,
        out_stride,
        out_half,
        start,
        start_stride,
        start_half,
        x,
        panel,
        num_groups,
        ahead,
        ahead_step,
    )


@jit
def group_bytes(weight_format):
    """Return the size of a panel's part of a group; there is one format."""
    return PANEL_BYTES


@jit
def multiply_tile(weight_format, num_rows, sums, rows, panel, num_groups, ahead, ahead_step):
    """sums[r] += rows[r] @ panel, for sums [num_rows, PANEL]."""
    stride = F32 * PANEL
    multiply_lined_tile(
        num_rows, sums, stride, VECTOR, sums, stride, VECTOR, rows, panel, num_groups, ahead, ahead_step
    )
