"""Products with one panel of packed fp32 weights: some tiles of rows by 32 output channels.

A panel passes by in pieces that a cache holds: where weights are kept in fewer than 32 bits
(`weight_packing.py`), a piece is expanded once for all the tiles.

Rows are numbered through a whole product, so an address represents row 0 whether or not that one is there. Products
are cut into tiles by `fp32_tile.first_row`.
"""

from __future__ import annotations

from typing import NamedTuple

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import external, jit
from pagemill.kernels.cpu.jit.row import F32, VECTOR
from pagemill.kernels.cpu.jit.vector import LANES
from pagemill.kernels.cpu.matmul.fp32_tile import (
    CUT,
    PANEL,
    WIDE,
    first_row,
    multiply_lined_tile,
    multiply_tile,
)
from pagemill.kernels.cpu.matmul.weight_formats import FLOAT32, ROW, expand, panel_bytes
from pagemill.kernels.cpu.matmul.work_sharing import BLOCK_ROWS

# A piece of a panel is read again for every tile: with AVX-512 from the second-level cache, which keeps up and leaves
# fewer sums to be stored between pieces (3% faster at 140 and 512 rows on Zen 4); with AVX2 from the first.
PIECE_INPUTS = 288 if CUT is WIDE else 96
SUMS_BYTES = BLOCK_ROWS * ROW
PIECE_BYTES = PIECE_INPUTS * ROW


class Strided(NamedTuple):
    """Rows of fp32 numbers: the address of row 0, and how far rows are apart, in bytes."""

    rows: int
    stride: int


class Lined(NamedTuple):
    """The same rows tile by tile, each as `multiply_lined_tile` takes it; address 0: they are not."""

    rows: int
    num_lines: int  # of each row


class Tiles(NamedTuple):
    """The tiles low .. high - 1 of a product of `num_rows` rows."""

    low: int
    high: int
    num_rows: int


class Weight(NamedTuple):
    """Addresses of packed panels and of the bias, filled up to whole panels; the format is a `PackedWeight`'s."""

    panels: int
    format: int
    bias: int
    out_features: int
    in_features: int


@jit
def tile_lines(x, tile, num_rows):
    """Return the address of a tile's lines, and its number of rows."""
    first = first_row(tile, num_rows)
    return x.rows + VECTOR * x.num_lines * first, first_row(tile + 1, num_rows) - first


@jit
def line_up(lined, x, tiles):
    """Copy the first lines of x, as many as `lined` has."""
    for tile in range(tiles.low, tiles.high):
        target, count = tile_lines(lined, tile, tiles.num_rows)
        source = x.rows + first_row(tile, tiles.num_rows) * x.stride
        for row in range(count):
            for line in range(lined.num_lines):
                to = target + VECTOR * (count * line + row)
                vector.store(to, vector.load(source + row * x.stride + VECTOR * line))


@jit
def _multiply_piece(out, start, x, lined, tiles, weights, begin, end, ahead, ahead_step):
    """out = start + x @ weights over the inputs begin .. end - 1 of x.

    The tiles fetch a share each of what is at `ahead`, `ahead_step` bytes for every input of the piece: memory works
    while the registers do.
    """
    in_lines = (end - begin) // LANES * LANES if lined.rows else 0
    step = ahead_step // (tiles.high - tiles.low)
    first, fetched = first_row(tiles.low, tiles.num_rows), ahead
    for tile in range(tiles.low, tiles.high):
        count = first_row(tile + 1, tiles.num_rows) - first
        to, origin, origin_stride = (
            out.rows + first * out.stride,
            start.rows + first * start.stride,
            start.stride,
        )
        if in_lines:
            multiply_lined_tile(
                count,
                to,
                out.stride,
                VECTOR,
                origin,
                origin_stride,
                VECTOR,
                lined.rows + VECTOR * (lined.num_lines * first + count * (begin // LANES)),
                weights,
                in_lines // LANES,
                fetched,
                step,
            )
            origin, origin_stride = to, out.stride
        if in_lines < end - begin:
            multiply_tile(
                count,
                to,
                out.stride,
                x.rows + first * x.stride + F32 * (begin + in_lines),
                x.stride,
                weights + ROW * in_lines,
                origin,
                origin_stride,
                end - begin - in_lines,
                fetched + in_lines * step,
                step,
            )
        first, fetched = first + count, fetched + (end - begin) * step


@external
def multiply_panel(out, start, x, lined, tiles, weight, panel, following, origin, begin, end, expanded, sums):
    """out = start + x @ one panel, over the inputs begin .. end - 1 of the weight; x begins with the input `origin`.

    Between the pieces results wait in `sums`: rows of `out` may lie so that they fall on the same lines of the cache.
    `out` may be `sums`. Asks for the panel `following` ahead of time; `expanded` is the address of PIECE_BYTES.
    """
    size = panel_bytes(weight.format, weight.in_features)
    codes, codes_after = weight.panels + size * panel, weight.panels + size * following
    step = size // weight.in_features
    for low in range(begin, end, PIECE_INPUTS):
        high = min(low + PIECE_INPUTS, end)
        weights = codes + ROW * low
        if weight.format != FLOAT32:
            weights = expanded
            expand(weight.format, codes, low, high, expanded)
        ahead = codes + step * high if high < end else codes_after + step * begin
        to = out if high == end else sums
        _multiply_piece(to, start, x, lined, tiles, weights, low - origin, high - origin, ahead, step)
        start = sums


@jit
def num_panels_of(weight):
    return (weight.out_features + PANEL - 1) // PANEL


@jit
def skip_rows(x, count):
    """x without its first rows."""
    return Strided(x.rows + count * x.stride, x.stride)


@jit
def bias_of(weight, panel):
    """The panel's bias, the same for every row."""
    return Strided(weight.bias + F32 * PANEL * panel, 0)


@jit
def sums_at(address, tiles):
    """Room for the sums of these tiles, SUMS_BYTES from `address` on."""
    return Strided(address - ROW * first_row(tiles.low, tiles.num_rows), ROW)
