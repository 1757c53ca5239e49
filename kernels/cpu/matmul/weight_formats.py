"""Formats of packed weight matrices: their memory layout, and the conversion to fp32.

A panel is 32 output channels. Its bytes, by format:

- FLOAT32: [in_features, 32] fp32.
- BFLOAT16: words [in_features, 16]: channel c in the low half of word c, channel 16 + c in its high half.
- FLOAT16: [in_features, 32] fp16.
- BYTES: per 32 inputs, the values [32, 32] int8, then the channels' scales [32] fp32.
- NIBBLES: per 32 inputs, words [2, 4, 16]: word (h, v, c) has channel 16 h + c of inputs 8 v to 8 v + 7, the
  first one lowest; then the channels' scales and offsets, [32] fp32 each. A weight is number * scale + offset.
- FLOAT8: like BYTES, with e4m3 values without NaN, and 256 times the scales.

For formats with scales, in_features is a multiple of 32.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import compiles_for, jit
from pagemill.kernels.cpu.jit.row import F32, VECTOR
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL

FLOAT32, BFLOAT16, FLOAT16, BYTES, NIBBLES, FLOAT8 = range(6)
GROUP = 32
"""Inputs that share a channel's scale."""

ROW = F32 * PANEL  # bytes of an input's weights in fp32
WORD_INPUTS = 8  # inputs whose nibbles share a word
BYTE_CODES = GROUP * PANEL
NIBBLE_CODES = GROUP * PANEL // 2
BYTES_GROUP = BYTE_CODES + ROW
NIBBLES_GROUP = NIBBLE_CODES + 2 * ROW

_ir = cgutils.ir
_I8X16, _I32X16 = _ir.VectorType(_ir.IntType(8), LANES), _ir.VectorType(_ir.IntType(32), LANES)
_F16X16, _I16X16 = _ir.VectorType(_ir.HalfType(), LANES), _ir.VectorType(_ir.IntType(16), LANES)


@jit
def panel_bytes(weight_format, in_features):
    if weight_format == NIBBLES:
        return in_features // GROUP * NIBBLES_GROUP
    if weight_format in (BYTES, FLOAT8):
        return in_features // GROUP * BYTES_GROUP
    if weight_format == FLOAT32:
        return in_features * ROW
    return in_features * ROW // 2


def _at(builder: Any, base: Any, distance: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(base, base.type(distance)), kind.as_pointer())


def _splat(value: int) -> Any:
    return _ir.Constant(_I32X16, [value] * LANES)


def _store(builder: Any, vector: Any, target: Any, distance: int) -> None:
    builder.store(vector, _at(builder, target, distance, F32X16), align=4)


def _expansion(emit: Any) -> Any:
    """Return an intrinsic that calls `emit(builder, source, target)` with two addresses."""

    @intrinsic
    def expand(typing_context: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit(builder, *arguments)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return expand


def _emit_bfloats(builder: Any, source: Any, target: Any) -> None:
    words = builder.load(_at(builder, source, 0, _I32X16), align=4)
    _store(builder, builder.bitcast(builder.shl(words, _splat(16)), F32X16), target, 0)
    _store(builder, builder.bitcast(builder.and_(words, _splat(-(1 << 16))), F32X16), target, VECTOR)


def _emit_halves(builder: Any, source: Any, target: Any) -> None:
    for half in range(2):
        numbers = builder.load(_at(builder, source, half * VECTOR // 2, _F16X16), align=2)
        _store(builder, builder.fpext(numbers, F32X16), target, half * VECTOR)


def _emit_byte_group(builder: Any, source: Any, target: Any) -> None:
    for half in range(2):
        scales = builder.load(_at(builder, source, BYTE_CODES + half * VECTOR, F32X16), align=4)
        for i in range(GROUP):
            codes = builder.load(_at(builder, source, i * PANEL + half * LANES, _I8X16), align=1)
            numbers = builder.sitofp(builder.sext(codes, _I32X16), F32X16)
            _store(builder, builder.fmul(numbers, scales), target, i * ROW + half * VECTOR)


def _emit_float8_group(builder: Any, source: Any, target: Any) -> None:
    """Emit e4m3 conversion: the bits shifted up by seven are an fp16 of 1/256 the value, subnormal or not."""
    for half in range(2):
        scales = builder.load(_at(builder, source, BYTE_CODES + half * VECTOR, F32X16), align=4)
        sign, rest, up, sign_up = (_ir.Constant(_I16X16, [n] * LANES) for n in (0x80, 0x7F, 7, 8))
        for i in range(GROUP):
            codes = builder.load(_at(builder, source, i * PANEL + half * LANES, _I8X16), align=1)
            wide = builder.zext(codes, _I16X16)
            bits = builder.or_(
                builder.shl(builder.and_(wide, rest), up), builder.shl(builder.and_(wide, sign), sign_up)
            )
            numbers = builder.fpext(builder.bitcast(bits, _F16X16), F32X16)
            _store(builder, builder.fmul(numbers, scales), target, i * ROW + half * VECTOR)


def _emit_lowest_nibbles(builder: Any, words: Any) -> Any:
    """Convert the lowest four bits of each lane to fp32."""
    if compiles_for("avx512f"):  # the instruction uses only those bits: cheaper than masking and converting
        table = _ir.Constant(F32X16, [float(number) for number in range(16)])
        return call(builder, "llvm.x86.avx512.permvar.sf.512", F32X16, [table, words])
    return builder.sitofp(builder.and_(words, _splat(15)), F32X16)


def _emit_nibble_group(builder: Any, source: Any, target: Any) -> None:
    for half in range(2):
        scales = builder.load(_at(builder, source, NIBBLE_CODES + half * VECTOR, F32X16), align=4)
        offsets = builder.load(_at(builder, source, NIBBLE_CODES + ROW + half * VECTOR, F32X16), align=4)
        for v in range(GROUP // WORD_INPUTS):
            at = (half * GROUP // WORD_INPUTS + v) * VECTOR
            words = builder.load(_at(builder, source, at, _I32X16), align=4)
            for k in range(WORD_INPUTS):
                numbers = _emit_lowest_nibbles(builder, builder.lshr(words, _splat(4 * k)))
                weights = call(builder, "llvm.fma.v16f32", F32X16, [numbers, scales, offsets])
                _store(builder, weights, target, (WORD_INPUTS * v + k) * ROW + half * VECTOR)


_expand_bfloats, _expand_halves = _expansion(_emit_bfloats), _expansion(_emit_halves)
_expand_byte_group, _expand_nibble_group = _expansion(_emit_byte_group), _expansion(_emit_nibble_group)
_expand_float8_group = _expansion(_emit_float8_group)


@jit(exact=True)
def expand(weight_format, panel, begin, end, target):
    """Write the weights of a panel's inputs begin .. end - 1 to `target`, fp32 [end - begin, 32]; not for FLOAT32."""
    if weight_format == NIBBLES:
        for group in range(begin // GROUP, end // GROUP):
            _expand_nibble_group(panel + group * NIBBLES_GROUP, target + (group * GROUP - begin) * ROW)
    elif weight_format == BYTES:
        for group in range(begin // GROUP, end // GROUP):
            _expand_byte_group(panel + group * BYTES_GROUP, target + (group * GROUP - begin) * ROW)
    elif weight_format == FLOAT8:
        for group in range(begin // GROUP, end // GROUP):
            _expand_float8_group(panel + group * BYTES_GROUP, target + (group * GROUP - begin) * ROW)
    elif weight_format == BFLOAT16:
        for i in range(begin, end):
            _expand_bfloats(panel + i * ROW // 2, target + (i - begin) * ROW)
    else:
        for i in range(begin, end):
            _expand_halves(panel + i * ROW // 2, target + (i - begin) * ROW)
