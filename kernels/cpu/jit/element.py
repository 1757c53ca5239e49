"""Values of a cache's dtype as floats inside numba kernels: 16 together, or one.

A kernel receives an *element*, a scalar whose numba type represents the dtype, and passes it down to loads
and stores. Each dtype then compiles to separate machine code, without branches on it inside loops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call, f32x16

_ir = cgutils.ir
_HALF, _FLOAT = _ir.HalfType(), _ir.FloatType()
_I8, _I16, _I32 = _ir.IntType(8), _ir.IntType(16), _ir.IntType(32)

ELEMENTS: dict[torch.dtype, Any] = {
    torch.float32: np.float32(0),
    torch.float16: np.int16(0),
    torch.bfloat16: np.uint16(0),
    torch.int8: np.int8(0),
    torch.float8_e4m3fn: np.uint8(0),
}
_ROUNDING: dict[torch.dtype, Any] = {torch.bfloat16: np.uint32(0), torch.int8: np.int32(0)}
_BFLOATS, _BYTES = (types.uint16, types.uint32), (types.int8, types.int32)
_BITS = {
    types.float32: 32,
    types.int16: 16,
    types.uint8: 8,
    **dict.fromkeys(_BFLOATS, 16),
    **dict.fromkeys(_BYTES, 8),
}


def element_of(dtype: torch.dtype, *, rounds: bool = False) -> Any:
    """Return the element of a cache of this dtype; `rounds`: `Scoring.rounds_to_cache`."""
    return (ELEMENTS | _ROUNDING if rounds else ELEMENTS)[dtype]


class _Lanes:
    """Emits the same instructions for a vector of 16 values or for one value."""

    def __init__(self, builder: Any, *, is_vector: bool) -> None:
        self._builder = builder
        self._is_vector = is_vector

    def type(self, scalar: Any) -> Any:
        return _ir.VectorType(scalar, LANES) if self._is_vector else scalar

    def constant(self, scalar: Any, value: float) -> Any:
        return _ir.Constant(self.type(scalar), [value] * LANES if self._is_vector else value)

    def call(self, name: str, value: Any) -> Any:
        suffix = "v16f32" if self._is_vector else "f32"
        return call(self._builder, f"llvm.{name}.{suffix}", value.type, [value])

    def load(self, element: Any, address: Any) -> Any:
        """Load the values at `address` as fp32, exactly."""
        builder = self._builder

        def read(scalar: Any) -> Any:
            pointer = builder.inttoptr(address, self.type(scalar).as_pointer())
            return builder.load(pointer, align=_BITS[element] // 8)

        if element == types.float32:
            return read(_FLOAT)
        if element == types.int16:
            return builder.fpext(read(_HALF), self.type(_FLOAT))
        if element in _BFLOATS:
            bits = builder.zext(read(_I16), self.type(_I32))
            return builder.bitcast(builder.shl(bits, self.constant(_I32, 16)), self.type(_FLOAT))
        if element in _BYTES:
            return builder.sitofp(builder.sext(read(_I8), self.type(_I32)), self.type(_FLOAT))
        # e4m3 has fp16's layout with an exponent one bit shorter: after the shift, the value is 2^8 too
        # small.
        bits = builder.zext(read(_I8), self.type(_I16))
        sign = builder.shl(builder.and_(bits, self.constant(_I16, 0x80)), self.constant(_I16, 8))
        rest = builder.shl(builder.and_(bits, self.constant(_I16, 0x7F)), self.constant(_I16, 7))
        half = builder.bitcast(builder.or_(sign, rest), self.type(_HALF))
        return builder.fmul(builder.fpext(half, self.type(_FLOAT)), self.constant(_FLOAT, 256.0))

    def store(self, element: Any, address: Any, value: Any) -> None:
        """Store fp32 values rounded to nearest, ties to even; int8 and fp8 must be within their range."""
        builder = self._builder
        if element == types.int16:
            value = builder.fptrunc(value, self.type(_HALF))
        elif element in _BFLOATS:
            value = self._to_bf16(value)
        elif element in _BYTES:
            whole = builder.fptosi(self.call("rint", value), self.type(_I32))
            value = builder.trunc(whole, self.type(_I8))
        elif element == types.uint8:
            value = self._to_e4m3(value)
        builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=_BITS[element] // 8)

    def _round_bits(self, bits: Any, dropped: int) -> Any:
        """Drop this many low bits of a float's pattern, rounding to nearest, ties to even."""
        builder = self._builder
        last = builder.and_(builder.lshr(bits, self.constant(_I32, dropped)), self.constant(_I32, 1))
        bits = builder.add(bits, builder.add(last, self.constant(_I32, (1 << (dropped - 1)) - 1)))
        return builder.lshr(bits, self.constant(_I32, dropped))

    def _to_bf16(self, value: Any) -> Any:
        builder = self._builder
        rounded = self._round_bits(builder.bitcast(value, self.type(_I32)), 16)
        is_nan = builder.fcmp_unordered("uno", value, value)
        rounded = builder.select(is_nan, self.constant(_I32, 0x7FC0), rounded)
        return builder.trunc(rounded, self.type(_I16))

    def _to_e4m3(self, value: Any) -> Any:
        builder = self._builder
        size = self.call("fabs", value)
        # The exponent's bias is 127 in fp32 and 7 here.
        normal = builder.sub(
            self._round_bits(builder.bitcast(size, self.type(_I32)), 20), self.constant(_I32, 120 << 3)
        )
        quanta = builder.fmul(size, self.constant(_FLOAT, 512.0))  # 2^-9 is the smallest positive value
        subnormal = builder.fptosi(self.call("rint", quanta), self.type(_I32))
        is_small = builder.fcmp_ordered("<", size, self.constant(_FLOAT, 2.0**-6))
        sign = builder.lshr(builder.bitcast(value, self.type(_I32)), self.constant(_I32, 31))
        sign = builder.shl(sign, self.constant(_I32, 7))
        code = builder.or_(sign, builder.select(is_small, subnormal, normal))
        return builder.trunc(code, self.type(_I8))


@intrinsic
def is_rounding(typing_context: Any, element: Any) -> Any:
    """Return True if values are exact in bfloat16 and are multiplied as bfloat16; known at compile time."""
    found = _ir.IntType(1)(element in (types.uint32, types.int32))
    return types.boolean(element), lambda context, builder, signature, arguments: found


@intrinsic
def size_of(typing_context: Any, element: Any) -> Any:
    """Return the number of bytes of a value."""
    size = _BITS[element] // 8
    return types.int64(element), lambda context, builder, signature, arguments: _ir.IntType(64)(size)


def _loading(result: Any, *, is_vector: bool) -> Any:
    def load(typing_context: Any, element: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return _Lanes(builder, is_vector=is_vector).load(element, arguments[1])

        return result(element, types.int64), generate

    return intrinsic(load)


def _storing(number: Any, *, is_vector: bool) -> Any:
    def store(typing_context: Any, element: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Lanes(builder, is_vector=is_vector).store(element, arguments[1], arguments[2])
            return context.get_dummy_value()

        return types.void(element, types.int64, number), generate

    return intrinsic(store)


load_vector = _loading(f32x16, is_vector=True)  # (element, address) -> 16 floats
load_number = _loading(types.float32, is_vector=False)
store_vector = _storing(f32x16, is_vector=True)  # (element, address, 16 floats)
store_number = _storing(types.float32, is_vector=False)


@intrinsic
def transpose(
    typing_context: Any, target: Any, target_stride: Any, element: Any, source: Any, source_stride: Any
) -> Any:
    """target[j, i] = source[i, j] for 16 x 16 values, as fp32; addresses, and row strides in bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, to_stride, _, at, at_stride = arguments
        int64 = at.type
        lanes = _Lanes(builder, is_vector=True)
        i32x16 = lanes.type(_I32)

        def row(address: Any, stride: Any, index: int) -> Any:
            return builder.add(address, builder.mul(stride, int64(index)))

        rows = [lanes.load(element, row(at, at_stride, i)) for i in range(LANES)]
        # Exchange the off-diagonal quarters of progressively smaller squares.
        for distance in (8, 4, 2, 1):
            for i in (i for i in range(LANES) if not i & distance):
                upper, lower = rows[i], rows[i + distance]
                first = [j if not j & distance else LANES + j - distance for j in range(LANES)]
                second = [j + distance if not j & distance else LANES + j for j in range(LANES)]
                rows[i] = builder.shuffle_vector(upper, lower, _ir.Constant(i32x16, first))
                rows[i + distance] = builder.shuffle_vector(upper, lower, _ir.Constant(i32x16, second))
        for i in range(LANES):
            pointer = builder.inttoptr(row(to, to_stride, i), F32X16.as_pointer())
            builder.store(rows[i], pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, element, types.int64, types.int64), generate
