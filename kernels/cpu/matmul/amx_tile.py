"""Tiles of a bfloat16 matmul with AMX: up to 2 x 16 rows times one panel, in the CPU's eight tile registers.

Products of even and of odd inputs of a 32-input group are summed separately, and both sums are added to an
fp32 sum at the end of the group. Each value of the result depends only on its row and channel, as with
`bf16_tile`. The order of summation differs, so the two agree only approximately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import compiles_for, jit
from pagemill.kernels.cpu.jit.row import F32, VECTOR
from pagemill.kernels.cpu.jit.vector import call
from pagemill.kernels.cpu.matmul.bf16_tile import PANEL_BYTES, ROW_BYTES
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL, first_row

IS_NATIVE = compiles_for("amx-bf16") and compiles_for("avx512bf16")

_SUMS, _ROWS, _HALVES = ((0, 1), (2, 3)), (4, 5), (6, 7)
"""The registers: sums of both tiles of rows by panel half, rows of a group, and halves of a panel's group."""
_LINE_BYTES = F32 * PANEL
"""Bytes between rows of sums, and between pairs of a panel."""
_AHEAD = 4 * PANEL_BYTES

_ir = cgutils.ir
_BYTE, _VOID = _ir.IntType(8), _ir.VoidType()
_CONFIGURATION = _ir.ArrayType(_BYTE, 64)


def _register(number: int) -> Any:
    return _ir.Constant(_BYTE, number)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTE.as_pointer())


@intrinsic
def _configure(typing_context: Any, num_rows: Any, num_more: Any) -> Any:
    """Set the heights of the registers of the first and second tile, at least 1; all others are full."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        fixed = [0] * 64
        fixed[0] = 1  # palette with eight registers of 16 lines
        fixed[16:32] = [VECTOR, 0] * 8
        fixed[48:56] = [16] * 8
        place = cgutils.alloca_once(builder, _CONFIGURATION)
        builder.store(_ir.Constant(_CONFIGURATION, bytearray(fixed)), place)
        for height, sums, rows in zip(arguments, _SUMS, _ROWS, strict=True):
            for number in (*sums, rows):
                builder.store(builder.trunc(height, _BYTE), cgutils.gep(builder, place, 0, 48 + number))
        call(builder, "llvm.x86.ldtilecfg", _VOID, [builder.bitcast(place, _BYTE.as_pointer())])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _release(typing_context: Any) -> Any:
    """Release the registers; otherwise the system would save their contents with the thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        call(builder, "llvm.x86.tilerelease", _VOID, [])
        return context.get_dummy_value()

    return types.void(), generate


def _multiplying(num_tiles: int) -> Any:
    """Return an intrinsic: sums[r] += rows[r] @ panel for the rows of one tile or two."""

    def body(builder: Any, arguments: Any) -> None:
        panel, num_groups, *places = arguments
        sums, rows, steps = places[:num_tiles], places[num_tiles : 2 * num_tiles], places[2 * num_tiles :]
        int64 = panel.type

        def load(number: int, address: Any, stride: int) -> None:
            call(
                builder, "llvm.x86.tileloadd64", _VOID,
                [_register(number), _pointer(builder, address), int64(stride)],
            )  # fmt: skip

        def each_sum() -> Any:
            for tile, address in enumerate(sums):
                for half, number in enumerate(_SUMS[tile]):
                    yield number, builder.add(address, int64(VECTOR * half))

        for number, address in each_sum():
            load(number, address, _LINE_BYTES)
        with cgutils.for_range(builder, num_groups, intp=int64) as groups:
            weights = builder.add(panel, builder.mul(groups.index, int64(PANEL_BYTES)))
            for line in range(0, PANEL_BYTES, VECTOR):
                _prefetch(builder, builder.add(weights, int64(_AHEAD + line)))
            for half, number in enumerate(_HALVES):
                load(number, builder.add(weights, int64(VECTOR * half)), _LINE_BYTES)
            for tile in range(num_tiles):
                load(_ROWS[tile], builder.add(rows[tile], builder.mul(groups.index, steps[tile])), ROW_BYTES)
                for number, half in zip(_SUMS[tile], _HALVES, strict=True):
                    operands = [_register(register) for register in (number, _ROWS[tile], half)]
                    call(builder, "llvm.x86.tdpbf16ps", _VOID, operands)
        for number, address in each_sum():
            stored = [_register(number), _pointer(builder, address), int64(_LINE_BYTES)]
            call(builder, "llvm.x86.tilestored64", _VOID, stored)

    return body


def _prefetch(builder: Any, address: Any) -> None:
    int32 = _ir.IntType(32)
    hints = [int32(0), int32(3), int32(1)]  # read, into the L1 cache, data
    call(builder, "llvm.prefetch.p0", _VOID, [_pointer(builder, address), *hints])


def _intrinsic_of(num_arguments: int, body: Callable[[Any, Any], None]) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        body(builder, arguments)
        return context.get_dummy_value()

    signature = types.void(*[types.int64] * num_arguments)
    if num_arguments == 5:
        return intrinsic(lambda typing_context, a, b, c, d, e: (signature, generate))
    return intrinsic(lambda typing_context, a, b, c, d, e, f, g, h: (signature, generate))


_multiply_one = _intrinsic_of(5, _multiplying(1))
_multiply_two = _intrinsic_of(8, _multiplying(2))


@jit
def multiply_panel(sums, rows, panel, num_groups, tiles):
    """sums[r] += rows[r] @ panel for some tiles; `sums` is a `Strided` whose rows are contiguous."""
    tile, first, height, more = tiles.low, first_row(tiles.low, tiles.num_rows), 0, 0
    while tile < tiles.high:
        middle, last = (
            first_row(tile + 1, tiles.num_rows),
            first_row(min(tile + 2, tiles.high), tiles.num_rows),
        )
        if middle - first != height or last - middle != more:
            height, more = middle - first, last - middle
            _configure(height, max(more, 1))
        out, x, step = (
            sums.rows + sums.stride * first,
            rows + ROW_BYTES * num_groups * first,
            ROW_BYTES * height,
        )
        if more == 0:
            _multiply_one(panel, num_groups, out, x, step)
        else:
            below, y = sums.rows + sums.stride * middle, rows + ROW_BYTES * num_groups * middle
            _multiply_two(panel, num_groups, out, below, x, y, step, ROW_BYTES * more)
        tile, first = tile + 2, last
    _release()
