"""Matmuls that convert rows on the fly, to 8-bit integers or bfloat16: y = x W^T + b.

Rows are converted in groups of 32 inputs. Each row's part of a group is stored where the tiles read it. Each
value of the result depends only on its row and channel, to the last bit, for any number of rows or threads.
The kernels' first argument is the kind of numbers (`kinds`): integers or bfloats.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pagemill.kernels import grouped_int8
from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import (
    NUMBERS_PER_THREAD,
    external,
    f32_pointer,
    jit,
    use_torch_threads,
)
from pagemill.kernels.cpu.jit.row import F32, VECTOR, address_of, line_in
from pagemill.kernels.cpu.jit.threads import launch, launch_rows
from pagemill.kernels.cpu.matmul import amx_tile, bf16_rows, bf16_tile, int8_rows, int8_tile
from pagemill.kernels.cpu.matmul.fp32_panel import (
    SUMS_BYTES,
    Strided,
    Tiles,
    Weight,
    num_panels_of,
    skip_rows,
    sums_at,
)
from pagemill.kernels.cpu.matmul.fp32_tile import MOST_ROWS, PANEL, first_row, num_tiles_of
from pagemill.kernels.cpu.matmul.kinds import INTEGERS, by_converted_kind, number_by_kind
from pagemill.kernels.cpu.matmul.work_sharing import (
    BLOCK_ROWS,
    FEWEST_ROWS,
    are_rows_taken,
    new_counter,
    panels_per_turn,
    plan_blocks,
    take,
)

GROUP = 32
assert GROUP == grouped_int8.GROUP == bf16_tile.GROUP
# This much of x stays in the L2 cache while all panels are processed.
_BLOCK_BYTES = 1 << 19
# This much of a panel stays in the L1 cache while all tiles of a block are processed.
_PIECE_GROUPS = 9

row_bytes = number_by_kind(int8_tile.ROW_BYTES, bf16_tile.ROW_BYTES)
"""Bytes of a row's part of a group."""
_group_bytes = by_converted_kind(int8_tile.group_bytes, bf16_tile.group_bytes)
_multiply_tile = by_converted_kind(int8_tile.multiply_tile, bf16_tile.multiply_tile)
convert_group = by_converted_kind(int8_rows.quantize_group, bf16_rows.round_group)


class PackedPanels(NamedTuple):
    """A weight's panels, padded with zeros."""

    panels: torch.Tensor
    """[num_panels, ...]"""
    weight_format: int
    """A format of `int8_tile`; bfloat16 has only one."""

    def some(self, panels: torch.Tensor) -> PackedPanels:
        """Return the panels with these numbers."""
        return PackedPanels(self.panels[panels], self.weight_format)


def multiply_packed(
    kind: object, x: torch.Tensor, packed: PackedPanels, bias: torch.Tensor, out_features: int
) -> torch.Tensor:
    """x [num_rows, in_features] fp32 times packed weights, plus bias [num_panels * PANEL]; new and contiguous.

    Args:
        kind: INTEGERS or BFLOATS, the kind whose `pack` made the weights.
    """
    num_rows, in_features = x.shape
    assert x.dtype is torch.float32
    assert x.stride(1) == 1 or in_features == 1
    out = torch.empty((num_rows, out_features))
    if num_rows:
        multiply_parallel(
            kind,
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            packed.panels.data_ptr(),
            packed.weight_format,
            bias.data_ptr(),
            num_rows,
            out_features,
            in_features,
            use_torch_threads(),
        )
    return out


@jit(exact=True, allocates=True)
def convert_rows(kind, first, last, num_rows, x, x_stride, rows, in_features):
    """Convert rows first .. last - 1 of x [num_rows, in_features] to their tiles' locations at `rows`.

    `x_stride` counts values.
    """
    num_groups = (in_features + GROUP - 1) // GROUP
    whole = in_features // GROUP
    rest = np.zeros(GROUP, np.float32)
    for tile in range(num_tiles_of(num_rows)):
        begin, end = first_row(tile, num_rows), first_row(tile + 1, num_rows)
        group_bytes = row_bytes(kind) * (end - begin)
        for row in range(max(first, begin), min(last, end)):
            source = x + F32 * row * x_stride
            target = rows + row_bytes(kind) * (num_groups * begin + row - begin)
            for group in range(whole):
                convert_group(kind, source + F32 * GROUP * group, target + group_bytes * group)
            if whole < num_groups:
                for i in range(in_features - whole * GROUP):
                    rest[i] = f32_pointer(source)[whole * GROUP + i]
                convert_group(kind, address_of(rest), target + group_bytes * whole)


@jit
def num_groups_of(weight):
    return (weight.in_features + GROUP - 1) // GROUP


@jit
def _pass_pieces(kind, sums, rows, weight, panel, following, tiles):
    """Process a panel in pieces that the L1 cache holds.

    Each tile prefetches a share of the next piece, or of the panel `following` at the end, to overlap memory
    and arithmetic.
    """
    num_groups, group_bytes = num_groups_of(weight), _group_bytes(kind, weight.format)
    size = group_bytes * num_groups
    address, after = weight.panels + size * panel, weight.panels + size * following
    for group in range(0, num_groups, _PIECE_GROUPS):
        count = min(_PIECE_GROUPS, num_groups - group)
        ahead = address + group_bytes * (group + count) if group + count < num_groups else after
        first = first_row(tiles.low, tiles.num_rows)
        for tile in range(tiles.low, tiles.high):
            last = first_row(tile + 1, tiles.num_rows)
            _multiply_tile(
                kind,
                weight.format,
                last - first,
                sums.rows + sums.stride * first,
                rows + row_bytes(kind) * (num_groups * first + (last - first) * group),
                address + group_bytes * group,
                count,
                ahead + group_bytes * count * (tile - tiles.low) // (tiles.high - tiles.low),
                VECTOR // (tiles.high - tiles.low),
            )
            first = last


@jit
def _pass_integers(sums, rows, weight, panel, following, tiles):
    _pass_pieces(INTEGERS, sums, rows, weight, panel, following, tiles)


@jit
def _pass_by_amx(sums, rows, weight, panel, following, tiles):
    num_groups = num_groups_of(weight)
    address = weight.panels + bf16_tile.PANEL_BYTES * num_groups * panel
    amx_tile.multiply_panel(sums, rows, address, num_groups, tiles)


_pass_panel = by_converted_kind(_pass_integers, _pass_by_amx) if amx_tile.IS_NATIVE else _pass_pieces


@external
def sum_panel(kind, sums, rows, weight, panel, following, tiles):
    """sums = the bias of a panel's channels + rows @ the panel, for some tiles; `sums` comes from `sums_at`."""
    bias = weight.bias + F32 * PANEL * panel
    start0, start1 = vector.load(bias), vector.load(bias + VECTOR)
    for row in range(first_row(tiles.low, tiles.num_rows), first_row(tiles.high, tiles.num_rows)):
        vector.store(sums.rows + sums.stride * row, start0)
        vector.store(sums.rows + sums.stride * row + VECTOR, start1)
    _pass_panel(kind, sums, rows, weight, panel, following, tiles)


@jit
def _multiply_channels(kind, out, rows, weight, panel, following, tiles, memory):
    """Multiply by one panel; `memory` is the address of SUMS_BYTES."""
    sums = sums_at(memory, tiles)
    sum_panel(kind, sums, rows, weight, panel, following, tiles)
    channel = panel * PANEL
    width = min(PANEL, weight.out_features - channel)
    for row in range(first_row(tiles.low, tiles.num_rows), first_row(tiles.high, tiles.num_rows)):
        source, target = sums.rows + sums.stride * row, out.rows + row * out.stride + F32 * channel
        if width == PANEL:
            vector.store(target, vector.load(source))
            vector.store(target + VECTOR, vector.load(source + VECTOR))
        else:
            for i in range(width):
                f32_pointer(target)[i] = f32_pointer(source)[i]


@jit
def tiles_at_once(kind, weight):
    """Return the number of tiles that stay in the L2 cache while all panels are processed."""
    by_bytes = _BLOCK_BYTES // (row_bytes(kind) * num_groups_of(weight) * MOST_ROWS)
    return max(FEWEST_ROWS // MOST_ROWS, min(by_bytes, BLOCK_ROWS // MOST_ROWS))


@jit
def _multiply_blocks(kind, first, last, out, rows, num_rows, weight, memory):
    """Multiply every row by panels first .. last - 1."""
    num_tiles, at_once = num_tiles_of(num_rows), tiles_at_once(kind, weight)
    num_blocks = (num_tiles + at_once - 1) // at_once
    for block in range(num_blocks):
        tiles = Tiles(num_tiles * block // num_blocks, num_tiles * (block + 1) // num_blocks, num_rows)
        for panel in range(first, last):
            _multiply_channels(kind, out, rows, weight, panel, panel + 1, tiles, line_in(memory))


@jit
def _take_panels(kind, counter, num_threads, out, rows, num_rows, weight, memory):
    tiles, num_panels = Tiles(0, num_tiles_of(num_rows), num_rows), num_panels_of(weight)
    per_turn = panels_per_turn(num_panels, num_threads)
    num_turns = (num_panels + per_turn - 1) // per_turn
    turn = take(line_in(counter))
    while turn < num_turns:
        next_turn = take(line_in(counter))
        last = min((turn + 1) * per_turn, num_panels)
        for panel in range(turn * per_turn, last):
            following = panel + 1 if panel + 1 < last else next_turn * per_turn
            _multiply_channels(kind, out, rows, weight, panel, following, tiles, line_in(memory))
        turn = next_turn


@jit(allocates=True)
def multiply_converted(kind, out, rows, num_rows, weight):
    """Multiply every row by all panels, on one thread. `rows` is the address of the output of `convert_rows`."""
    memory = np.empty(SUMS_BYTES + VECTOR, np.uint8)
    _multiply_blocks(kind, 0, num_panels_of(weight), out, rows, num_rows, weight, memory)


@jit(allocates=True)
def multiply_share(kind, thread, num_threads, counter, out, rows, num_rows, weight):
    """One thread's part of a matmul that divides panels, not rows, among threads.

    Threads take panels dynamically if the rows fit their L2 caches; otherwise shares are fixed.
    """
    memory = np.empty(SUMS_BYTES + VECTOR, np.uint8)
    if num_tiles_of(num_rows) <= tiles_at_once(kind, weight):
        _take_panels(kind, counter, num_threads, out, rows, num_rows, weight, memory)
    else:
        num_panels = num_panels_of(weight)
        first, last = num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads
        _multiply_blocks(kind, first, last, out, rows, num_rows, weight, memory)


@jit
def workspace_bytes(kind, num_rows, weight):
    """Bytes of the converted rows, including alignment to a cache line."""
    return num_rows * num_groups_of(weight) * row_bytes(kind) + VECTOR


@jit
def _multiply_block_in(kind, workspace, out, x, num_rows, weight):
    rows = line_in(workspace)
    convert_rows(kind, 0, num_rows, num_rows, x.rows, x.stride // F32, rows, weight.in_features)
    multiply_converted(kind, out, rows, num_rows, weight)


@jit(allocates=True)
def multiply_rows(kind, out, x, num_rows, weight):
    """Convert and multiply every row by all panels, on one thread. `x` and `out` are `Strided`."""
    workspace = np.empty(workspace_bytes(kind, num_rows, weight), np.uint8)
    _multiply_block_in(kind, workspace, out, x, num_rows, weight)


@jit(allocates=True)
def multiply_range(kind, first, last, out, x, num_rows, weight):
    """Convert and multiply every row by panels first .. last - 1, on one thread. `x` and `out` are `Strided`."""
    workspace = np.empty(workspace_bytes(kind, num_rows, weight), np.uint8)
    memory = np.empty(SUMS_BYTES + VECTOR, np.uint8)
    convert_part(0, num_rows, kind, num_rows, x.rows, x.stride // F32, workspace, weight.in_features)
    _multiply_blocks(kind, first, last, out, line_in(workspace), num_rows, weight, memory)


@external
def multiply_block(kind, out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features):
    """Run `multiply_parallel` on one thread."""
    weight = Weight(packed, weight_format, bias, out_features, in_features)
    multiply_rows(kind, Strided(out, F32 * out_features), Strided(x, F32 * x_stride), num_rows, weight)


@jit(exact=True)
def convert_part(first, last, kind, num_rows, x, x_stride, workspace, in_features):
    convert_rows(kind, first, last, num_rows, x, x_stride, line_in(workspace), in_features)


@jit
def convert(kind, workspace, x, x_stride, num_rows, in_features, num_threads):
    """Convert all rows into the workspace, on one thread or all."""
    if num_rows * in_features < 2 * NUMBERS_PER_THREAD:
        convert_part(0, num_rows, kind, num_rows, x, x_stride, workspace, in_features)
    else:
        arguments = (kind, num_rows, x, x_stride, workspace, in_features)
        launch_rows(convert_part, num_threads, num_rows, arguments)


@jit
def _multiply_part(
    thread, kind, num_threads, counter, out, workspace, packed, weight_format, bias, num_rows, out_features, in_features
):  # fmt: skip
    weight = Weight(packed, weight_format, bias, out_features, in_features)
    target = Strided(out, F32 * out_features)
    multiply_share(kind, thread, num_threads, counter, target, line_in(workspace), num_rows, weight)


@jit
def _multiply_taken_rows(
    thread, kind, counter, bounds, out, x, x_stride, packed, weight_format, bias, out_features, in_features
):
    weight = Weight(packed, weight_format, bias, out_features, in_features)
    source, target = Strided(x, F32 * x_stride), Strided(out, F32 * out_features)
    block = take(line_in(counter))
    while block < len(bounds) - 1:
        low, high = bounds[block], bounds[block + 1]
        multiply_rows(kind, skip_rows(target, low), skip_rows(source, low), high - low, weight)
        block = take(line_in(counter))


@external(allocates=True)
def multiply_parallel(
    kind, out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features, num_threads
):
    """Same arguments as `fp32.multiply_parallel`; x is converted here."""
    counter = new_counter()
    # As there, blocks of rows are distributed if every thread gets one. No thread waits for another.
    if are_rows_taken(num_rows, num_threads):
        bounds = plan_blocks(num_rows, num_threads)
        rows = (
            kind,
            counter,
            bounds,
            out,
            x,
            x_stride,
            packed,
            weight_format,
            bias,
            out_features,
            in_features,
        )
        launch(_multiply_taken_rows, num_threads, rows)
        return
    weight = Weight(packed, weight_format, bias, out_features, in_features)
    workspace = np.empty(workspace_bytes(kind, num_rows, weight), np.uint8)
    convert(kind, workspace, x, x_stride, num_rows, in_features, num_threads)
    arguments = (
        kind, num_threads, counter, out, workspace, packed, weight_format, bias, num_rows, out_features, in_features,
    )  # fmt: skip
    launch(_multiply_part, num_threads, arguments)
