"""Tiles of an integer matmul: some 8-bit quantized rows times one panel of 8-bit or 4-bit weights.

AVX-512 VNNI multiplies unsigned by signed bytes, and weights are the unsigned operand. Signed weights are
stored with a zero point added. This adds the zero point times the sum of the row's group to every channel, so
sums start at minus that value. AVX2 can also multiply bytes, but it saturates sums of two products at 16
bits. For 8-bit weights it therefore multiplies words, and a row is stored as bytes and as words. Products of
4-bit weights are small enough for 16 bits to hold the sum of a complete group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import compiles_for, external, jit, prefetch_line
from pagemill.kernels.cpu.jit.row import F32, I32, VECTOR
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call, emit_splat
from pagemill.kernels.cpu.matmul.fp32_tile import CUT, PANEL, Cut, by_height, prefetch_row
from pagemill.kernels.grouped_int8 import GROUP

ZERO_POINT = 128  # of 8-bit weights
QUAD = 4  # inputs whose weights are adjacent
QUADS = GROUP // QUAD
_LINE = PANEL * F32  # one 32-bit value per channel of a panel: a quad's 8-bit weights, or a scale
# Their 6 sums, 16 vectors of weights and the values of some quads fill the 32 registers of AVX-512.
_ROWS_TOGETHER = 3
F16 = 2  # bytes

_ir = cgutils.ir
_I32, _F32 = _ir.IntType(32), _ir.FloatType()
_I32X16 = _ir.VectorType(_I32, LANES)
_I16X32 = _ir.VectorType(_ir.IntType(16), 2 * LANES)
_F16X16 = _ir.VectorType(_ir.HalfType(), LANES)
_BYTE_PRODUCTS, _WORD_PRODUCTS, _FEW = (
    ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512", LANES)
    if compiles_for("avx512bw")
    else ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd", LANES // 2)
)
"""Instructions that sum two products of bytes, and of words; and the number of channels of one instruction."""
_FEW_INTEGERS = _ir.VectorType(_I32, _FEW)
_FEW_WORDS = _ir.VectorType(_ir.IntType(16), 2 * _FEW)
_FEW_BYTES = _ir.VectorType(_ir.IntType(8), 4 * _FEW)


class Products(NamedTuple):
    """A CPU's instructions for multiplying 8-bit integers."""

    parts: tuple[tuple[int, ...], ...]
    """The inputs of a quad that one instruction multiplies; a row's values fill 32 bits."""
    split: Callable[[Any, Any, int], Any]
    """split(builder, weights, part): emits a part's 8-bit weights from quads [LANES] int32."""
    nibbles: int
    """Mask of a part's 4-bit weights, after a shift to the low bits of each value."""
    multiply: Callable[[Any, Any, Any, Any], Any]
    """multiply(builder, sums, weights, numbers): emits sums + a part's weights times its values, all of [LANES]."""

    @property
    def number_bytes(self) -> int:
        return I32 // len(self.parts[0])

    # A row's part of a group: the values, their scale, the start of the channels' sums for 8-bit weights, and
    # the values' sum times their scale. The parts of a tile's rows are adjacent, group by group, so every
    # value is at a fixed distance from one address. Rows far apart would need an address register each, and
    # there are too few registers.
    @property
    def row_scale(self) -> int:
        return GROUP * self.number_bytes

    @property
    def row_start(self) -> int:
        return self.row_scale + F32

    @property
    def row_sum(self) -> int:
        return self.row_start + I32

    @property
    def row_octets(self) -> int:
        """Offset of the values stored as bytes, quad by quad."""
        return 0 if self.number_bytes == 1 else self.row_sum + F32

    @property
    def row_bytes(self) -> int:
        return self.row_sum + F32 + (0 if self.number_bytes == 1 else GROUP)


def _byte_products(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _I32X16, [sums, weights, numbers])


def _words_of(builder: Any, weights: Any, part: int) -> Any:
    """Return bytes 0 and 2 of every lane, or bytes 1 and 3, as words."""
    words = builder.bitcast(weights, _I16X32)
    if part == 1:
        return builder.lshr(words, _ir.Constant(_I16X32, [8] * 2 * LANES))
    return builder.and_(words, _ir.Constant(_I16X32, [255] * 2 * LANES))


def _word_products(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    halves: list[Any] = []
    weights, numbers = (builder.bitcast(words, _I16X32) for words in (weights, numbers))
    half_sums = _ir.VectorType(_I32, LANES // 2)
    for first in (0, LANES):
        lanes = _ir.Constant(_I32X16, list(range(first, first + LANES)))
        operands = [builder.shuffle_vector(operand, operand, lanes) for operand in (weights, numbers)]
        halves.append(call(builder, "llvm.x86.avx2.pmadd.wd", half_sums, operands))
    both = builder.shuffle_vector(*halves, _ir.Constant(_I32X16, list(range(LANES))))
    return builder.add(sums, both)


def _shifted_products(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    def bits(count: int) -> Any:
        return _ir.Constant(_I32X16, [count] * LANES)

    for quarter in range(0, 32, 8):
        weight = builder.lshr(builder.shl(weights, bits(24 - quarter)), bits(24))
        number = builder.ashr(builder.shl(numbers, bits(24 - quarter)), bits(24))
        sums = builder.add(sums, builder.mul(weight, number))
    return sums


def _unchanged(builder: Any, weights: Any, part: int) -> Any:
    return weights


BYTES = Products(((0, 1, 2, 3),), _unchanged, 0x0F0F0F0F, _byte_products)  # AVX-512 VNNI
WORDS = Products(((0, 2), (1, 3)), _words_of, 0x000F000F, _word_products)  # AVX2
SHIFTED = Products(((0, 1, 2, 3),), _unchanged, 0x0F0F0F0F, _shifted_products)  # any CPU


PRODUCTS = BYTES if compiles_for("avx512vnni") else WORDS if compiles_for("avx2") else SHIFTED

ROW_BYTES = PRODUCTS.row_bytes


class Format(NamedTuple):
    """Layout of a panel's part of a group: lines of weights, then the channels' scales and optional offsets.

    A line holds one quad's 8-bit weights, channel by channel, or two quads' 4-bit weights. The second quad is
    in the upper half of each byte.
    """

    quads_per_line: int
    zero_point: int
    """The stored value of a weight of 0."""
    factor_bytes: int
    """Bytes of a scale or an offset: fp32 or fp16."""
    has_offsets: bool = False
    """A weight is number * scale, or number * scale + offset."""

    @property
    def weight_lines(self) -> int:
        return QUADS // self.quads_per_line

    @property
    def num_factors(self) -> int:
        """Number of values per channel in addition to its weights."""
        return 2 if self.has_offsets else 1

    @property
    def factors_at(self) -> int:
        return _LINE * self.weight_lines

    @property
    def row_bytes(self) -> int:
        """Bytes of a panel's scales."""
        return PANEL * self.factor_bytes

    @property
    def group_bytes(self) -> int:
        return self.factors_at + self.num_factors * self.row_bytes


FORMATS = (
    Format(1, ZERO_POINT, F32),
    Format(1, ZERO_POINT, F16),
    Format(2, 8, F16),
    Format(2, 0, F32, has_offsets=True),
    Format(2, 0, F16, has_offsets=True),
)
EIGHT_BITS, EIGHT_BITS_HALVES, FOUR_BITS_HALVES, FOUR_BITS_OFFSET, FOUR_BITS_OFFSET_HALVES = range(
    len(FORMATS)
)
"""A weight's format, as an index of `FORMATS`. All 4-bit weights with fp32 scales have offsets."""
_GROUP_BYTES = tuple(form.group_bytes for form in FORMATS)


class _Group(NamedTuple):
    """Addresses of a group: its rows' part, its panel's part, and the first cache line to prefetch."""

    rows: Any
    weights: Any
    ahead: Any


class _Tile:
    """Emits a tile of some height, one pass over a panel's halves after the other."""

    def __init__(
        self, products: Products, form: Format, builder: Any, num_rows: int, arguments: list[Any]
    ) -> None:
        self._products, self._format, self._builder, self._num_rows = products, form, builder, num_rows
        self._sums, self._rows, self._panel, self._num_groups, self._ahead, self._ahead_step = arguments

    def emit(self, halves: range) -> None:
        builder, int64 = self._builder, self._sums.type
        with cgutils.for_range(builder, self._num_groups, intp=int64) as groups:
            row_bytes = int64(self._num_rows * self._products.row_bytes)
            group_bytes = self._format.group_bytes
            ahead_bytes = builder.mul(self._ahead_step, int64(group_bytes // VECTOR))
            group = _Group(
                builder.add(self._rows, builder.mul(groups.index, row_bytes)),
                builder.add(self._panel, builder.mul(groups.index, int64(group_bytes))),
                builder.add(self._ahead, builder.mul(groups.index, ahead_bytes)),
            )
            self._add_group(group, halves)

    def _add_group(self, group: _Group, halves: range) -> None:
        raise NotImplementedError

    def _load(self, kind: Any, address: Any, distance: int = 0) -> Any:
        builder = self._builder
        at = builder.inttoptr(builder.add(address, address.type(distance)), kind.as_pointer())
        return builder.load(at, align=4)

    def _halves_of(self, kind: Any, line: Any, halves: range, distance: int = 0) -> list[Any]:
        return [self._load(kind, line, distance + VECTOR * half) for half in halves]

    def _row_number(self, rows: Any, row: int, distance: int, kind: Any = _I32) -> Any:
        """Load the value at `distance` in a row's part of a group, into every lane."""
        distance += self._products.row_bytes * row
        return emit_splat(self._builder, self._load(kind, rows, distance))

    def _start(self, group: _Group, row: int) -> Any:
        """Return the start value of a row's sums."""
        if self._format.zero_point == 0:
            return _splat(0)
        start = self._row_number(group.rows, row, self._products.row_start)
        shift = (ZERO_POINT // self._format.zero_point).bit_length() - 1
        return self._builder.ashr(start, _splat(shift)) if shift else start

    def _prefetch(self, group: _Group, line: Any, halves: range) -> None:
        prefetch_row(self._builder, group.ahead, self._ahead_step, line, halves)

    def _prefetch_factors(self, group: _Group, halves: range) -> None:
        form = self._format
        first, last = form.factors_at // VECTOR, form.group_bytes // VECTOR
        for line in range(first + halves[0], last, 2 // len(halves)):
            address = self._builder.mul(self._ahead_step, group.ahead.type(line))
            prefetch_line(self._builder, self._builder.add(group.ahead, address))

    def _factors_of(self, group: _Group, row: int, halves: range) -> list[Any]:
        """Load scales (row 0) or offsets (row 1) as fp32."""
        size, at = self._format.factor_bytes, self._format.factors_at + self._format.row_bytes * row
        kind = F32X16 if size == F32 else _F16X16
        vectors = [self._load(kind, group.weights, at + LANES * size * half) for half in halves]
        return vectors if size == F32 else [self._builder.fpext(vector, F32X16) for vector in vectors]

    def _add_to_sums(self, group: _Group, rows: range, halves: range, totals: list[list[Any]]) -> None:
        """Convert these rows' integer sums and add them to the totals."""
        builder = self._builder
        scales, *offsets = (self._factors_of(group, row, halves) for row in range(self._format.num_factors))
        for row, row_totals in zip(rows, totals, strict=True):
            targets = [self._sums.type(row * PANEL * F32 + VECTOR * half) for half in halves]
            sums = [self._load(F32X16, builder.add(self._sums, target)) for target in targets]
            for channel_offsets in offsets:
                row_sum = self._row_number(group.rows, row, self._products.row_sum, _F32)
                sums = [
                    _fma(builder, offset, row_sum, number)
                    for offset, number in zip(channel_offsets, sums, strict=True)
                ]
            row_scale = self._row_number(group.rows, row, self._products.row_scale, _F32)
            for target, number, scale, total in zip(targets, sums, scales, row_totals, strict=True):
                factor = builder.fmul(scale, row_scale)
                added = _fma(builder, builder.sitofp(total, F32X16), factor, number)
                address = builder.add(self._sums, target)
                builder.store(added, builder.inttoptr(address, F32X16.as_pointer()), align=4)


class _QuadByQuad(_Tile):
    """Keeps all rows' sums in registers and loads one quad's weights at a time, for CPUs with few registers."""

    def _add_group(self, group: _Group, halves: range) -> None:
        builder, int64 = self._builder, self._sums.type
        totals = [[cgutils.alloca_once(builder, _I32X16) for _ in halves] for _ in range(self._num_rows)]
        for row, row_totals in enumerate(totals):
            start = self._start(group, row)
            for total in row_totals:
                builder.store(start, total)
        # Process one part and one quad at a time: with the weights of several loaded, sums would spill. LLVM
        # unrolls loops over fewer quads, such as only the first of each line, and then loads several.
        for part in range(len(self._products.parts)):
            with cgutils.for_range(builder, int64(QUADS), intp=int64) as quads:
                self._add_quad(group, quads.index, part, halves, totals)
        self._prefetch_factors(group, halves)
        loaded = [[builder.load(total) for total in row_totals] for row_totals in totals]
        self._add_to_sums(group, range(self._num_rows), halves, loaded)

    def _add_quad(self, group: _Group, quad: Any, part: int, halves: range, totals: list[list[Any]]) -> None:
        """Add a part of a quad."""
        builder, products, per_line = self._builder, self._products, self._format.quads_per_line
        index = builder.udiv(quad, quad.type(per_line))
        if part == 0:
            self._prefetch(group, index, halves)
        line = builder.add(group.weights, builder.mul(index, index.type(_LINE)))
        weights = self._halves_of(_I32X16, line, halves)
        if per_line == 1:
            vectors = [products.split(builder, vector, part) for vector in weights]
        else:
            place = builder.trunc(builder.urem(quad, quad.type(per_line)), _I32)
            bits = builder.add(builder.mul(place, _I32(4)), _I32(8 * part))
            shifted = [builder.lshr(vector, emit_splat(builder, bits)) for vector in weights]
            vectors = [builder.and_(vector, _splat(products.nibbles)) for vector in shifted]
        quad_bytes = QUAD * products.number_bytes
        numbers = builder.add(group.rows, builder.mul(quad, quad.type(quad_bytes)))
        for row, row_totals in enumerate(totals):
            number = self._row_number(numbers, row, I32 * part)
            for vector, total in zip(vectors, row_totals, strict=True):
                builder.store(products.multiply(builder, builder.load(total), vector, number), total)


class _SmallQuads(_Tile):
    """`_QuadByQuad` for 4-bit weights, with byte products: half as many instructions.

    The largest sum is GROUP / 2 products of 15 and 127 in each of two words, which 16 bits hold.
    """

    def _add_group(self, group: _Group, halves: range) -> None:
        builder, int64 = self._builder, self._sums.type
        count = len(halves) * LANES // _FEW
        words = [
            [cgutils.alloca_once_value(builder, _FEW_WORDS([0] * 2 * _FEW)) for _ in range(count)]
            for _ in range(self._num_rows)
        ]
        with cgutils.for_range(builder, int64(QUADS), intp=int64) as quads:
            self._add_quad(group, quads.index, halves, words)
        self._prefetch_factors(group, halves)
        totals = []
        for row, row_words in enumerate(words):
            start, each = self._start(group, row), count // len(halves)
            sums = [self._sum_of(row_words[at : at + each]) for at in range(0, count, each)]
            totals.append([builder.add(start, one) for one in sums])
        self._add_to_sums(group, range(self._num_rows), halves, totals)

    def _add_quad(self, group: _Group, quad: Any, halves: range, words: list[list[Any]]) -> None:
        builder, per_line = self._builder, self._format.quads_per_line
        index = builder.udiv(quad, quad.type(per_line))
        self._prefetch(group, index, halves)
        line = builder.add(group.weights, builder.mul(index, index.type(_LINE)))
        place = builder.trunc(builder.urem(quad, quad.type(per_line)), _I32)
        bits = _few_of(builder, builder.mul(place, _I32(4)))
        vectors = []
        for at in range(VECTOR * halves[0], VECTOR * (halves[-1] + 1), I32 * _FEW):
            shifted = builder.lshr(self._load(_FEW_INTEGERS, line, at), bits)
            vectors.append(builder.and_(shifted, _FEW_INTEGERS([0x0F0F0F0F] * _FEW)))
        numbers = builder.add(group.rows, builder.mul(quad, quad.type(QUAD)))
        for row, row_words in enumerate(words):
            distance = self._products.row_octets + self._products.row_bytes * row
            number = _few_of(builder, self._load(_I32, numbers, distance))
            for vector, total in zip(vectors, row_words, strict=True):
                operands = [builder.bitcast(operand, _FEW_BYTES) for operand in (vector, number)]
                product = call(builder, _BYTE_PRODUCTS, _FEW_WORDS, operands)
                builder.store(builder.add(builder.load(total), product), total)

    def _sum_of(self, words: list[Any]) -> Any:
        """Sum adjacent words, for a vector of channels."""
        builder, ones = self._builder, _FEW_WORDS([1] * 2 * _FEW)
        sums = [call(builder, _WORD_PRODUCTS, _FEW_INTEGERS, [builder.load(one), ones]) for one in words]
        if len(sums) == 1:
            return sums[0]
        return builder.shuffle_vector(*sums, _ir.Constant(_I32X16, list(range(LANES))))


def _few_of(builder: Any, number: Any) -> Any:
    """Copy a value into the lanes of one instruction."""
    one = builder.insert_element(_ir.Constant(_FEW_INTEGERS, _ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(one, one, _FEW_INTEGERS([0] * _FEW))


class _GroupByGroup(_Tile):
    """Keeps all of a group's weights in registers, and the sums of a few rows at a time.

    Converting a row's sums waits for the last of a chain of multiplications. It runs in parallel with the
    multiplications of the next rows. With the sums of all rows in registers, all rows would be converted at
    the same time, and no multiplication could start.
    """

    def _add_group(self, group: _Group, halves: range) -> None:
        line: list[Any] = []
        vectors: list[list[Any]] = []
        for first in range(0, self._num_rows, _ROWS_TOGETHER):
            rows = range(first, min(first + _ROWS_TOGETHER, self._num_rows))
            totals = [[self._start(group, row)] * len(halves) for row in rows]
            for quad in range(QUADS):
                if first == 0:
                    index, place = divmod(quad, self._format.quads_per_line)
                    if place == 0:
                        line = self._halves_of(_I32X16, group.weights, halves, _LINE * index)
                        self._prefetch(group, group.ahead.type(index), halves)
                    vectors.append([self._quad_of(vector, place) for vector in line])
                self._add_quad(group, rows, quad, vectors[quad], totals)
            if first == 0:
                self._prefetch_factors(group, halves)
            self._add_to_sums(group, rows, halves, totals)

    def _quad_of(self, line: Any, place: int) -> Any:
        """Return the weights of one of a line's quads, as unsigned bytes."""
        if self._format.quads_per_line == 1:
            return line
        builder = self._builder
        shifted = builder.lshr(line, _splat(4)) if place else line
        return builder.and_(shifted, _splat(self._products.nibbles))

    def _add_quad(
        self, group: _Group, rows: range, quad: int, vectors: list[Any], totals: list[list[Any]]
    ) -> None:
        for row, row_totals in zip(rows, totals, strict=True):
            number = self._row_number(group.rows, row, I32 * quad)
            row_totals[:] = [
                self._products.multiply(self._builder, total, vector, number)
                for vector, total in zip(vectors, row_totals, strict=True)
            ]


def _splat(number: int) -> Any:
    return _ir.Constant(_I32X16, [number] * LANES)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, "llvm.fma.v16f32", F32X16, [a, b, c])


def make_tile(products: Products, cut: Cut, form: Format) -> Any:
    """Return an intrinsic: sums[r, 0..PANEL) += rows[r] @ panel, for 1 to `cut.most_rows` rows.

    For every cache line of the panel it prefetches the one at `ahead`, which advances by `ahead_step` bytes.
    """

    def body(builder: Any, num_rows: int, arguments: list[Any]) -> None:
        is_small = products is WORDS and form.quads_per_line > 1
        kind = _GroupByGroup if products is BYTES else _SmallQuads if is_small else _QuadByQuad
        tile = kind(products, form, builder, num_rows, arguments)
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


_tile8, _tile8_halves, _tile4_halves, _tile4_offset, _tile4_offset_halves = (
    make_tile(PRODUCTS, CUT, form) for form in FORMATS
)


@jit
def group_bytes(weight_format):
    """Return the size of a panel's part of a group."""
    return _GROUP_BYTES[weight_format]


@external
def multiply_tile(weight_format, num_rows, sums, rows, panel, num_groups, ahead, ahead_step):
    """`make_tile` for this CPU and a weight's format."""
    if weight_format == EIGHT_BITS:
        _tile8(num_rows, sums, rows, panel, num_groups, ahead, ahead_step)
    elif weight_format == EIGHT_BITS_HALVES:
        _tile8_halves(num_rows, sums, rows, panel, num_groups, ahead, ahead_step)
    elif weight_format == FOUR_BITS_HALVES:
        _tile4_halves(num_rows, sums, rows, panel, num_groups, ahead, ahead_step)
    elif weight_format == FOUR_BITS_OFFSET:
        _tile4_offset(num_rows, sums, rows, panel, num_groups, ahead, ahead_step)
    else:
        _tile4_offset_halves(num_rows, sums, rows, panel, num_groups, ahead, ahead_step)
