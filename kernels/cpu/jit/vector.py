"""Vectors of 16 floats as values inside numba kernels, one AVX-512 register each (or two or four narrower ones).

A loop that LLVM vectorizes automatically ends each short dot product in a costly prologue and epilogue, and
heads of 64 values consist only of short dot products. Here the kernel specifies the contents of each
register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16

_ir = cgutils.ir
F32X16 = _ir.VectorType(_ir.FloatType(), LANES)
_I32X16 = _ir.VectorType(_ir.IntType(32), LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="f32x16")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        super().__init__(manager, frontend_type, F32X16)


f32x16 = _Vector()


def call(builder: Any, name: str, result: Any, arguments: list[Any], fastmath: tuple[str, ...] = ()) -> Any:
    function_type = _ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, arguments, fastmath=fastmath)


def _constant(value: float) -> Any:
    return _ir.Constant(F32X16, [value] * LANES)


def _operation(emit: Callable[..., Any], num_operands: int, result: Any = f32x16) -> Any:
    """Return an intrinsic of `num_operands` vectors; `emit(builder, *operands)` adds its instructions."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit(builder, *arguments)

    if num_operands == 1:
        return intrinsic(lambda typing_context, a: (result(f32x16), generate))
    if num_operands == 2:
        return intrinsic(lambda typing_context, a, b: (result(f32x16, f32x16), generate))
    if num_operands == 3:
        return intrinsic(lambda typing_context, a, b, c: (result(f32x16, f32x16, f32x16), generate))
    return intrinsic(lambda typing_context, a, b, c, d, e: (result(*[f32x16] * 5), generate))


def _emit_add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _emit_sum(builder: Any, a: Any) -> Any:
    zero = _ir.Constant(_ir.FloatType(), -0.0)
    return call(builder, "llvm.vector.reduce.fadd.v16f32", zero.type, [zero, a], ("reassoc",))


def _emit_max(builder: Any, a: Any) -> Any:
    return call(builder, "llvm.vector.reduce.fmax.v16f32", _ir.FloatType(), [a])


def _emit_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _emit_maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


# 2 ** f on [-0.5, 0.5], fitted by least squares of the relative error: 8e-8.
_EXP2 = (1.0000001192, 0.6931469440, 0.2402212172, 0.0555074252, 0.0096754599, 0.0013266971)


def _emit_exp2(builder: Any, x: Any) -> Any:
    is_zero = builder.fcmp_ordered("<", x, _constant(-126.0))
    x = builder.select(is_zero, _constant(-126.0), x)  # preserves NaN, unlike a maximum
    whole = call(builder, "llvm.rint.v16f32", F32X16, [x])
    fraction = builder.fsub(x, whole)
    result = _constant(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        result = _emit_multiply_add(builder, result, fraction, _constant(coefficient))
    exponent = builder.add(builder.fptosi(whole, _I32X16), _ir.Constant(_I32X16, [127] * LANES))
    power = builder.bitcast(builder.shl(exponent, _ir.Constant(_I32X16, [23] * LANES)), F32X16)
    return builder.select(is_zero, _constant(0.0), builder.fmul(result, power))


def _emit_keep(builder: Any, vector: Any, numbers: Any, first: Any, end: Any, other: Any) -> Any:
    is_kept = builder.and_(
        builder.fcmp_ordered(">=", numbers, first), builder.fcmp_ordered("<", numbers, end)
    )
    return builder.select(is_kept, vector, other)


absolute = _operation(lambda builder, a: call(builder, "llvm.fabs.v16f32", F32X16, [a]), 1)
add = _operation(_emit_add, 2)
subtract = _operation(lambda builder, a, b: builder.fsub(a, b), 2)
multiply = _operation(lambda builder, a, b: builder.fmul(a, b), 2)
divide = _operation(lambda builder, a, b: builder.fdiv(a, b), 2)
maximum = _operation(_emit_maximum, 2)
multiply_add = _operation(_emit_multiply_add, 3)  # a * b + c
exp2 = _operation(_emit_exp2, 1)  # for x <= 127, to 1e-7; 0 below -126; NaN for NaN
keep = _operation(_emit_keep, 5)  # a where c <= b < d, e elsewhere
max_lanes = _operation(_emit_max, 1, types.float32)
sum_lanes = _operation(_emit_sum, 1, types.float32)


def emit_splat(builder: Any, value: Any) -> Any:
    """Copy the scalar into every lane, for intrinsics that consist of several instructions."""
    kind = _ir.VectorType(value.type, LANES)
    one = builder.insert_element(_ir.Constant(kind, _ir.Undefined), value, _ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, _ir.Constant(_I32X16, [0] * LANES))


@intrinsic
def splat(typing_context: Any, value: Any) -> Any:
    """Copy the scalar into every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return emit_splat(builder, arguments[0])

    return f32x16(types.float32), generate


@intrinsic
def count_from(typing_context: Any, first: Any) -> Any:
    """Return first, first + 1, ... for a float32 `first`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _ir.Constant(F32X16, [float(lane) for lane in range(LANES)])
        return builder.fadd(lanes, emit_splat(builder, arguments[0]))

    return f32x16(types.float32), generate


def _vector_pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, F32X16.as_pointer())


@intrinsic
def load(typing_context: Any, address: Any) -> Any:
    """Load the 16 floats at `address` (int64, any alignment)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_vector_pointer(builder, arguments[0]), align=4)

    return f32x16(types.int64), generate


@intrinsic
def store(typing_context: Any, address: Any, vector: Any) -> Any:
    """Write the 16 floats at `address` (int64, any alignment)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], _vector_pointer(builder, arguments[0]), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), generate


def _shuffle(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(x, y, _ir.Constant(_ir.VectorType(_ir.IntType(32), len(lanes)), lanes))


def _fold(builder: Any, combine: Callable[..., Any], x: Any, y: Any, distance: int) -> Any:
    """Interleave x and y in runs of `distance` lanes, each run combined with the next one."""
    first = [j if not j & distance else LANES + j - distance for j in range(LANES)]
    second = [lane + distance for lane in first]
    return combine(builder, _shuffle(builder, x, y, first), _shuffle(builder, x, y, second))


def _fold_all(builder: Any, combine: Callable[..., Any], vectors: list[Any]) -> Any:
    """Combine a power of two of vectors; the result's lanes represent them repeatedly, in order."""
    distance = 1
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors, distance = [_fold(builder, combine, x, y, distance) for x, y in pairs], 2 * distance
    return vectors[0]


def _of_each(combine: Callable[..., Any]) -> Any:
    """Return an intrinsic: lane r = `combine` over the lanes of vector r, for the LANES vectors at `address`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (address,) = arguments
        places = (builder.add(address, address.type(4 * LANES * row)) for row in range(LANES))
        rows = [builder.load(_vector_pointer(builder, place), align=4) for place in places]
        return _fold_all(builder, combine, rows)

    return intrinsic(lambda typing_context, address: (f32x16(types.int64), generate))


max_of_each, sum_of_each = _of_each(_emit_maximum), _of_each(_emit_add)


@intrinsic
def add_sums(typing_context: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Add the sums of a, b, c and d to the four floats at `address`: half the shuffles of four `sum_lanes`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, *vectors = arguments
        sums = _fold_all(builder, _emit_add, vectors)
        for half in (8, 4):
            low, high = list(range(half)), list(range(half, 2 * half))
            sums = builder.fadd(_shuffle(builder, sums, sums, low), _shuffle(builder, sums, sums, high))
        pointer = builder.inttoptr(address, sums.type.as_pointer())
        builder.store(builder.fadd(builder.load(pointer, align=4), sums), pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, f32x16, f32x16, f32x16, f32x16), generate
