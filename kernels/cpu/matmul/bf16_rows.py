"""Round rows to bfloat16 into the layout that the tiles of `bf16_tile` read."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import jit
from pagemill.kernels.cpu.jit.row import VECTOR
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call
from pagemill.kernels.cpu.matmul.bf16_tile import BF16, IS_NATIVE

_ir = cgutils.ir
_I16X16, _I16X32 = (_ir.VectorType(_ir.IntType(16), lanes) for lanes in (LANES, 2 * LANES))
_I32X16 = _ir.VectorType(_ir.IntType(32), LANES)


def _plainly_rounded(builder: Any, numbers: Any) -> Any:
    """Round to nearest, ties to even; preserves NaN."""

    def splat(value: int) -> Any:
        return _ir.Constant(_I32X16, [value] * LANES)

    bits = builder.bitcast(numbers, _I32X16)
    last = builder.and_(builder.lshr(bits, splat(16)), splat(1))
    rounded = builder.add(bits, builder.add(last, splat(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)
    rounded = builder.select(is_nan, splat(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, splat(16)), _I16X16)


@intrinsic
def round_lines(typing_context: Any, low: Any, high: Any, target: Any) -> Any:
    """Round LANES floats at `low` and LANES at `high` to a row's part of a group at `target`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def pointer(address: Any, distance: int, kind: Any) -> Any:
            return builder.inttoptr(builder.add(address, address.type(distance)), kind.as_pointer())

        first, second = (builder.load(pointer(address, 0, F32X16), align=4) for address in arguments[:2])
        target = arguments[2]
        if IS_NATIVE:
            both = call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _I16X32, [second, first])
            builder.store(both, pointer(target, 0, _I16X32), align=4)
        else:
            for numbers, at in ((first, 0), (second, LANES * BF16)):
                builder.store(_plainly_rounded(builder, numbers), pointer(target, at, _I16X16), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@jit
def round_group(source, target):
    """Round GROUP floats at `source` to a row's part of a group at `target`."""
    round_lines(source, source + VECTOR, target)


@intrinsic
def pair_lines(typing_context: Any, first: Any, second: Any, target: Any) -> Any:
    """Write LANES pairs of a value at `first` and one at `second` to `target`; bfloat16 holds the floats exactly."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointers = [builder.inttoptr(address, _I32X16.as_pointer()) for address in arguments]
        low, high = (builder.load(pointer, align=4) for pointer in pointers[:2])
        low = builder.lshr(low, _ir.Constant(_I32X16, [16] * LANES))
        high = builder.and_(high, _ir.Constant(_I32X16, [-(1 << 16)] * LANES))
        builder.store(builder.or_(low, high), pointers[2], align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
