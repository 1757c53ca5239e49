"""Quantize rows for `int8_tile`: groups of 8-bit integers with one scale each, in the tiles' layout."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.row import F32, VECTOR
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call, emit_splat
from pagemill.kernels.cpu.matmul.int8_tile import PRODUCTS, QUAD, ZERO_POINT
from pagemill.kernels.grouped_int8 import GROUP, LIMIT
from pagemill.kernels.types.layer_cache import SMALLEST_PEAK

_ir = cgutils.ir
_I32, _F32 = _ir.IntType(32), _ir.FloatType()
_I32X16 = _ir.VectorType(_I32, LANES)
_NUMBERS = _ir.VectorType(_ir.IntType(8 * PRODUCTS.number_bytes), LANES)
_OCTETS = _ir.VectorType(_ir.IntType(8), LANES)
_INFINITY_BITS = 0x7F800000


def _constant(kind: Any, value: float) -> Any:
    return _ir.Constant(kind, [value] * LANES)


def _narrowed(builder: Any, numbers: Any) -> Any:
    """Return LANES integers in the order that the tiles read, quad by quad and part by part."""
    order = [quad + i for quad in range(0, LANES, QUAD) for part in PRODUCTS.parts for i in part]
    narrow = builder.trunc(numbers, _NUMBERS)
    return builder.shuffle_vector(narrow, narrow, _ir.Constant(_I32X16, order))


@intrinsic
def quantize_group(typing_context: Any, source: Any, target: Any) -> Any:
    """Quantize GROUP floats at `source` to a row's part of a group at `target`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = arguments
        int64 = source.type

        def pointer(base: Any, distance: int, kind: Any) -> Any:
            return builder.inttoptr(builder.add(base, int64(distance)), kind.as_pointer())

        numbers = [builder.load(pointer(source, at, F32X16), align=4) for at in range(0, F32 * GROUP, VECTOR)]
        # As integers, absolute values sort like the floats, with infinity and NaN above all.
        largest = _constant(_I32X16, 0)
        for number in numbers:
            size = builder.and_(builder.bitcast(number, _I32X16), _constant(_I32X16, 0x7FFFFFFF))
            largest = builder.select(builder.icmp_signed(">", size, largest), size, largest)
        bits = call(builder, "llvm.vector.reduce.smax.v16i32", _I32, [largest])
        is_finite = builder.icmp_signed("<", bits, _I32(_INFINITY_BITS))
        peak, smallest = builder.bitcast(bits, _F32), _F32(np.float32(SMALLEST_PEAK))
        peak = builder.select(builder.fcmp_ordered(">", peak, smallest), peak, smallest)
        factors = emit_splat(builder, builder.fdiv(_F32(LIMIT), peak))
        are_finite = emit_splat(builder, is_finite)
        total = _constant(_I32X16, 0)
        for index, number in enumerate(numbers):
            scaled = builder.select(are_finite, builder.fmul(number, factors), _constant(F32X16, 0.0))
            whole = builder.fptosi(call(builder, "llvm.rint.v16f32", F32X16, [scaled]), _I32X16)
            total = builder.add(total, whole)
            distance = LANES * PRODUCTS.number_bytes * index
            builder.store(_narrowed(builder, whole), pointer(target, distance, _NUMBERS), align=QUAD)
            if PRODUCTS.number_bytes > 1:
                place = pointer(target, PRODUCTS.row_octets + LANES * index, _OCTETS)
                builder.store(builder.trunc(whole, _OCTETS), place, align=QUAD)
        scale = builder.select(is_finite, builder.fdiv(peak, _F32(LIMIT)), _F32(float("nan")))
        builder.store(scale, pointer(target, PRODUCTS.row_scale, _F32), align=4)
        total = call(builder, "llvm.vector.reduce.add.v16i32", _I32, [total])
        start = builder.mul(total, _I32(-ZERO_POINT))
        builder.store(start, pointer(target, PRODUCTS.row_start, _I32), align=4)
        row_sum = builder.fmul(builder.sitofp(total, _F32), scale)
        builder.store(row_sum, pointer(target, PRODUCTS.row_sum, _F32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
