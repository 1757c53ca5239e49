"""Tiles of a product of 8-bit integers: some quantised rows times one panel.

AVX-512 VNNI multiplies unsigned by signed bytes. Weights are the unsigned ones, 128 too large, which adds 128 times
the sum of the row's group to every channel alike: sums start from that number with its sign turned. AVX2 can multiply
bytes as well, but its sums of two products are cut off at 16 bits; words are multiplied there, and a row's numbers
are kept as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import compiles_for, external
from pagemill.kernels.cpu.jit.row import F32, I32, VECTOR
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call, emit_splat
from pagemill.kernels.cpu.matmul.fp32_tile import CUT, PANEL, Cut, by_height, prefetch_row
from pagemill.kernels.grouped_int8 import GROUP

ZERO_POINT = 128  # the byte of a weight of 0
QUAD = 4  # inputs whose weights lie beside each other
QUADS = GROUP // QUAD
# A panel's part of a group: the weights, quad by quad and then channel by channel; then the channels' scales.
WEIGHT_BYTES = PANEL * GROUP
PANEL_BYTES = WEIGHT_BYTES + PANEL * F32
# Their 6 sums, 16 vectors of weights and the numbers of some quads fill the 32 registers of AVX-512.
_ROWS_TOGETHER = 3

_ir = cgutils.ir
_I32, _F32 = _ir.IntType(32), _ir.FloatType()
_I32X16 = _ir.VectorType(_I32, LANES)
_I16X32 = _ir.VectorType(_ir.IntType(16), 2 * LANES)


class Products(NamedTuple):
    """A CPU's instructions for products of 8-bit integers."""

    parts: tuple[tuple[int, ...], ...]
    """Which inputs of a quad are multiplied by one instruction, a row's numbers filling 32 bits."""
    split: Callable[[Any, Any, int], Any]
    """split(builder, weights, part): a part's weights, of quads [LANES] int32."""
    multiply: Callable[[Any, Any, Any, Any], Any]
    """multiply(builder, sums, weights, numbers): emits sums + a part's weights times its numbers, all of [LANES]."""

    @property
    def number_bytes(self) -> int:
        return I32 // len(self.parts[0])

    # A row's part of a group: the numbers, their scale, and what the channels' sums start from. The parts of a tile's
    # rows lie beside each other, group by group: each number is then at a fixed distance from one address. Rows far
    # apart would take a register each for theirs, of which there are too few.
    @property
    def row_scale(self) -> int:
        return GROUP * self.number_bytes

    @property
    def row_start(self) -> int:
        return self.row_scale + F32

    @property
    def row_bytes(self) -> int:
        return self.row_start + I32


def _byte_products(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _I32X16, [sums, weights, numbers])


def _words_of(builder: Any, weights: Any, part: int) -> Any:
    """The bytes 0 and 2 of every lane, or 1 and 3, as words."""
    words = builder.bitcast(weights, _I16X32)
    if part == 1:
        return builder.lshr(words, _ir.Constant(_I16X32, [8] * 2 * LANES))
    return builder.and_(words, _ir.Constant(_I16X32, [255] * 2 * LANES))


def _word_products(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    numbers, halves = builder.bitcast(numbers, _I16X32), []
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


def _whole(builder: Any, weights: Any, part: int) -> Any:
    return weights


BYTES = Products(((0, 1, 2, 3),), _whole, _byte_products)  # AVX-512 VNNI
WORDS = Products(((0, 2), (1, 3)), _words_of, _word_products)  # AVX2
SHIFTED = Products(((0, 1, 2, 3),), _whole, _shifted_products)  # any CPU


PRODUCTS = BYTES if compiles_for("avx512vnni") else WORDS if compiles_for("avx2") else SHIFTED

ROW_BYTES = PRODUCTS.row_bytes


class _Group(NamedTuple):
    """Addresses of a group: its rows' part, its panel's, and the first cache line to ask for."""

    rows: Any
    weights: Any
    ahead: Any


class _Tile:
    """Emits a tile of some height, one of the passes of a panel's halves after the other."""

    def __init__(self, products: Products, builder: Any, num_rows: int, arguments: list[Any]) -> None:
        self._products, self._builder, self._num_rows = products, builder, num_rows
        self._sums, self._rows, self._panel, self._num_groups, self._ahead, self._ahead_step = arguments

    def emit(self, halves: range) -> None:
        builder, int64 = self._builder, self._sums.type
        with cgutils.for_range(builder, self._num_groups, intp=int64) as groups:
            group_bytes = int64(self._num_rows * self._products.row_bytes)
            ahead_bytes = builder.mul(self._ahead_step, int64(PANEL_BYTES // VECTOR))
            group = _Group(
                builder.add(self._rows, builder.mul(groups.index, group_bytes)),
                builder.add(self._panel, builder.mul(groups.index, int64(PANEL_BYTES))),
                builder.add(self._ahead, builder.mul(groups.index, ahead_bytes)),
            )
            self._add_group(group, halves)

    def _add_group(self, group: _Group, halves: range) -> None:
        raise NotImplementedError

    def _load(self, kind: Any, address: Any, distance: int = 0) -> Any:
        builder = self._builder
        at = builder.inttoptr(builder.add(address, address.type(distance)), kind.as_pointer())
        return builder.load(at, align=4)

    def _weights_of(self, quad: Any, halves: range) -> list[Any]:
        return [self._load(_I32X16, quad, VECTOR * half) for half in halves]

    def _scales_of(self, group: _Group, halves: range) -> list[Any]:
        return [self._load(F32X16, group.weights, WEIGHT_BYTES + VECTOR * half) for half in halves]

    def _row_number(self, rows: Any, row: int, distance: int, kind: Any = _I32) -> Any:
        """The number that far into a row's part of a group, in every lane."""
        distance += self._products.row_bytes * row
        return emit_splat(self._builder, self._load(kind, rows, distance))

    def _ask_ahead(self, group: _Group, quad: Any, halves: range) -> None:
        """Once for each line of a quad's weights; the scales are as large as another quad."""
        prefetch_row(self._builder, group.ahead, self._ahead_step, quad, halves)

    def _add_to_sums(
        self, group: _Group, row: int, halves: range, scales: list[Any], totals: list[Any]
    ) -> None:
        builder = self._builder
        row_scale = self._row_number(group.rows, row, self._products.row_scale, _F32)
        for half, scale, total in zip(halves, scales, totals, strict=True):
            distance = row * PANEL * F32 + VECTOR * half
            operands = [
                builder.sitofp(total, F32X16),
                builder.fmul(scale, row_scale),
                self._load(F32X16, self._sums, distance),
            ]
            added = call(builder, "llvm.fma.v16f32", F32X16, operands)
            target = builder.add(self._sums, self._sums.type(distance))
            builder.store(added, builder.inttoptr(target, F32X16.as_pointer()), align=4)


class _QuadByQuad(_Tile):
    """All rows' sums in registers, a quad's weights at a time: for few registers."""

    def _add_group(self, group: _Group, halves: range) -> None:
        builder, int64 = self._builder, self._sums.type
        totals = [[cgutils.alloca_once(builder, _I32X16) for _ in halves] for _ in range(self._num_rows)]
        for row, row_totals in enumerate(totals):
            start = self._row_number(group.rows, row, self._products.row_start)
            for total in row_totals:
                builder.store(start, total)
        # One part after the other: with the weights of several at hand, sums would spill.
        for part in range(len(self._products.parts)):
            with cgutils.for_range(builder, int64(QUADS), intp=int64) as quads:
                if part == 0:
                    self._ask_ahead(group, quads.index, halves)
                self._add_quad(group, quads.index, part, halves, totals)
        scales = self._scales_of(group, halves)
        self._ask_ahead(group, int64(QUADS), halves)
        for row, row_totals in enumerate(totals):
            self._add_to_sums(group, row, halves, scales, [builder.load(total) for total in row_totals])

    def _add_quad(self, group: _Group, index: Any, part: int, halves: range, totals: list[list[Any]]) -> None:
        builder, products = self._builder, self._products
        quad = builder.add(group.weights, builder.mul(index, index.type(PANEL * QUAD)))
        vectors = [products.split(builder, weights, part) for weights in self._weights_of(quad, halves)]
        numbers = builder.add(group.rows, builder.mul(index, index.type(QUAD * products.number_bytes)))
        for row, row_totals in enumerate(totals):
            number = self._row_number(numbers, row, I32 * part)
            for vector, total in zip(vectors, row_totals, strict=True):
                builder.store(products.multiply(builder, builder.load(total), vector, number), total)


class _GroupByGroup(_Tile):
    """All of a group's weights in registers, and the sums of a few rows at a time.

    The conversion of some rows' sums, which each wait for the last of a chain of products, then runs beside the
    products of the next. With the sums of all rows in registers, every row would be converted at the same time, while
    no product can begin.
    """

    def _add_group(self, group: _Group, halves: range) -> None:
        builder, products, int64 = self._builder, self._products, self._sums.type
        vectors: list[list[Any]] = []
        for first in range(0, self._num_rows, _ROWS_TOGETHER):
            rows = range(first, min(first + _ROWS_TOGETHER, self._num_rows))
            totals = [[self._row_number(group.rows, row, products.row_start)] * len(halves) for row in rows]
            for quad in range(QUADS):
                if first == 0:
                    place = builder.add(group.weights, int64(PANEL * QUAD * quad))
                    vectors.append(self._weights_of(place, halves))
                    self._ask_ahead(group, int64(quad), halves)
                for row, row_totals in zip(rows, totals, strict=True):
                    number = self._row_number(group.rows, row, I32 * quad)
                    row_totals[:] = [
                        products.multiply(builder, total, vector, number)
                        for vector, total in zip(vectors[quad], row_totals, strict=True)
                    ]
            if first == 0:
                self._ask_ahead(group, int64(QUADS), halves)
            scales = self._scales_of(group, halves)
            for row, row_totals in zip(rows, totals, strict=True):
                self._add_to_sums(group, row, halves, scales, row_totals)


def make_tile(products: Products, cut: Cut) -> Any:
    """An intrinsic: sums[r, 0..PANEL) += rows[r] @ panel for 1 to `cut.most_rows` rows.

    With every cache line of the panel it asks for the one at `ahead`, `ahead_step` bytes further each time.
    """

    def body(builder: Any, num_rows: int, arguments: list[Any]) -> None:
        tile = (_GroupByGroup if products is BYTES else _QuadByQuad)(products, builder, num_rows, arguments)
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


_tile = make_tile(PRODUCTS, CUT)


@external
def multiply_tile(num_rows, sums, rows, panel, num_groups, ahead, ahead_step):
    """`make_tile` for this CPU."""
    _tile(num_rows, sums, rows, panel, num_groups, ahead, ahead_step)
