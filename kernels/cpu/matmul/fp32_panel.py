"""Matmuls with one panel of packed fp32 weights: some tiles of rows by 32 output channels.

A panel is processed in pieces that fit a cache. If weights are stored in fewer than 32 bits
(`weight_packing.py`), a piece is expanded once for all tiles.

Rows are numbered over the complete matmul, so an address stands for row 0 even if that row does not exist.
`fp32_tile.first_row` divides matmuls into tiles.
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

# Every tile reads a piece of a panel again. With AVX-512 it comes from the L2 cache, which is fast enough and
# leaves fewer sums to store between pieces (3% faster at 140 and 512 rows on Zen 4); with AVX2 from the L1
# cache.
PIECE_INPUTS = 288 if CUT is WIDE else 96
SUMS_BYTES = BLOCK_ROWS * ROW
PIECE_BYTES = PIECE_INPUTS * ROW


class Strided(NamedTuple):
    """Rows of fp32 values: the address of row 0, and the distance between rows in bytes."""

    rows: int
    stride: int


class Lined(NamedTuple):
    """The same rows tile by tile, in the layout of `multiply_lined_tile`; address 0 means that there are none."""

    rows: int
    num_lines: int  # of each row


class Tiles(NamedTuple):
    """The tiles low .. high - 1 of a matmul of `num_rows` rows."""

    low: int
    high: int
    num_rows: int


class Weight(NamedTuple):
    """Addresses of packed panels and of the bias, padded to complete panels. The format is a `PackedWeight`'s."""

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
    """Copy the first `lined.num_lines` lines of x."""
    for tile in range(tiles.low, tiles.high):
        target, count = tile_lines(lined, tile, tiles.num_rows)
        source = x.rows + first_row(tile, tiles.num_rows) * x.stride
        for row in range(count):
            for line in range(lined.num_lines):
                to = target + VECTOR * (count * line + row)
                vector.store(to, vector.load(source + row * x.stride + VECTOR * line))


@jit
def _multiply_piece(out, start, x, lined, tiles, weights, begin, end, ahead, ahead_step):
    """out = start + x @ weights, over inputs begin .. end - 1 of x.

    Each tile prefetches a share of the memory at `ahead`, `ahead_step` bytes for every input of the piece, to
    overlap memory and arithmetic.
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
    """out = start + x @ one panel, over inputs begin .. end - 1 of the weight. x starts at input `origin`.

    Between pieces, results stay in `sums`, because rows of `out` can map to the same cache lines. `out` may
    be `sums`. Prefetches the panel `following`; `expanded` is the address of PIECE_BYTES.
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
    """Return x without its first rows."""
    return Strided(x.rows + count * x.stride, x.stride)


@jit
def bias_of(weight, panel):
    """Return the panel's bias, the same for every row."""
    return Strided(weight.bias + F32 * PANEL * panel, 0)


@jit
def sums_at(address, tiles):
    """Return memory for the sums of these tiles, SUMS_BYTES from `address`."""
    return Strided(address - ROW * first_row(tiles.low, tiles.num_rows), ROW)
