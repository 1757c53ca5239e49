"""The gated MLP of a decoder layer, for matmuls of converted rows: the counterpart of `fp32_mlp`.

A panel pair produces 32 channels of `silu(gate) * up`, which are one input group of the next matmul. They are
converted immediately and never written as floats. Values are identical to those of `converted` and
`fused_rows` to the last bit.
"""

from __future__ import annotations

import numpy as np

from pagemill.kernels.cpu.fused_rows import silu_times
from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import jit
from pagemill.kernels.cpu.jit.row import F32, VECTOR, line_in
from pagemill.kernels.cpu.jit.threads import launch
from pagemill.kernels.cpu.matmul.converted import (
    GROUP,
    convert,
    convert_group,
    convert_part,
    multiply_converted,
    multiply_share,
    row_bytes,
    sum_panel,
    tiles_at_once,
    workspace_bytes,
)
from pagemill.kernels.cpu.matmul.fp32_panel import SUMS_BYTES, Strided, Tiles, Weight, num_panels_of, sums_at
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL, first_row, num_tiles_of
from pagemill.kernels.cpu.matmul.work_sharing import new_counter, panels_per_turn, take

assert GROUP == PANEL
_THREAD_BYTES = 2 * SUMS_BYTES + F32 * GROUP


@jit(exact=True)
def _gate_tile(kind, target, gates, ups, num_rows, gated):
    """Compute one group of a tile's rows from both sums [num_rows, PANEL]; `gated` is the address of GROUP floats."""
    for row in range(num_rows):
        at = F32 * PANEL * row
        vector.store(gated, silu_times(vector.load(gates + at), vector.load(ups + at)))
        vector.store(
            gated + VECTOR, silu_times(vector.load(gates + at + VECTOR), vector.load(ups + at + VECTOR))
        )
        convert_group(kind, gated, target + row_bytes(kind) * row)


@jit
def _gate_pair(kind, gated, rows, weight, pair, following, tiles, memory):
    """Compute the group `pair` of silu(gate) * up, converted. `memory` is the address of _THREAD_BYTES."""
    num_groups = num_panels_of(weight) // 2
    gates, ups = sums_at(memory, tiles), sums_at(memory + SUMS_BYTES, tiles)
    sum_panel(kind, gates, rows, weight, pair, num_groups + pair, tiles)
    sum_panel(kind, ups, rows, weight, num_groups + pair, following, tiles)
    first = first_row(tiles.low, tiles.num_rows)
    for tile in range(tiles.low, tiles.high):
        count = first_row(tile + 1, tiles.num_rows) - first
        target = gated + row_bytes(kind) * (num_groups * first + count * pair)
        gate, up = gates.rows + gates.stride * first, ups.rows + ups.stride * first
        _gate_tile(kind, target, gate, up, count, memory + 2 * SUMS_BYTES)
        first += count


@jit
def _gate_blocks(kind, first, last, gated, workspace, num_rows, weight, memory):
    """Compute pairs first .. last - 1 of every row."""
    num_tiles, at_once = num_tiles_of(num_rows), tiles_at_once(kind, weight)
    for low in range(0, num_tiles, at_once):
        tiles = Tiles(low, min(low + at_once, num_tiles), num_rows)
        for pair in range(first, last):
            _gate_pair(kind, gated, line_in(workspace), weight, pair, pair + 1, tiles, line_in(memory))


@jit(allocates=True)
def gate_rows(kind, gated, x, num_rows, weight):
    """gated = silu(gate) * up of every row of x (`Strided`), converted, on one thread."""
    workspace = np.empty(workspace_bytes(kind, num_rows, weight), np.uint8)
    memory = np.empty(_THREAD_BYTES + VECTOR, np.uint8)
    convert_part(0, num_rows, kind, num_rows, x.rows, x.stride // F32, workspace, weight.in_features)
    _gate_blocks(kind, 0, num_panels_of(weight) // 2, gated, workspace, num_rows, weight, memory)


@jit
def _take_pairs(kind, counter, num_threads, gated, workspace, num_rows, weight, memory):
    tiles, num_pairs = Tiles(0, num_tiles_of(num_rows), num_rows), num_panels_of(weight) // 2
    per_turn = panels_per_turn(num_pairs, num_threads)
    num_turns = (num_pairs + per_turn - 1) // per_turn
    turn = take(line_in(counter))
    while turn < num_turns:
        next_turn = take(line_in(counter))
        last = min((turn + 1) * per_turn, num_pairs)
        for pair in range(turn * per_turn, last):
            following = pair + 1 if pair + 1 < last else next_turn * per_turn
            _gate_pair(kind, gated, line_in(workspace), weight, pair, following, tiles, line_in(memory))
        turn = next_turn


@jit(allocates=True)
def _gate_part(thread, kind, num_threads, counter, layer, gated, workspace, num_rows):
    """One thread's part: pairs are taken dynamically if the rows fit the L2 cache; otherwise shares are fixed."""
    memory, weight = np.empty(_THREAD_BYTES + VECTOR, np.uint8), _gate_weight(layer)
    if num_tiles_of(num_rows) <= tiles_at_once(kind, weight):
        _take_pairs(kind, counter, num_threads, gated, workspace, num_rows, weight, memory)
    else:
        num_pairs = num_panels_of(weight) // 2
        first, last = num_pairs * thread // num_threads, num_pairs * (thread + 1) // num_threads
        _gate_blocks(kind, first, last, gated, workspace, num_rows, weight, memory)


@jit(allocates=True)
def _gate_parallel(kind, layer, gated, x, num_rows, num_threads):
    counter, size = new_counter(), layer[0].hidden_size
    workspace = np.empty(workspace_bytes(kind, num_rows, _gate_weight(layer)), np.uint8)
    convert(kind, workspace, x, size, num_rows, size, num_threads)
    launch(_gate_part, num_threads, (kind, num_threads, counter, layer, gated, workspace, num_rows))


@jit
def _gate_weight(layer):
    channels = 2 * layer[0].intermediate_size
    return Weight(
        layer[0].gate_up, layer[0].gate_up_format, layer[0].gate_up_bias, channels, layer[0].hidden_size
    )


@jit
def _down_weight(layer):
    size, inner = layer[0].hidden_size, layer[0].intermediate_size
    return Weight(layer[0].down, layer[0].down_format, layer[0].down_bias, size, inner)


@jit
def mlp_rows(kind, layer, x, gated, num_rows):
    """x = mlp(x) on one thread; `gated` is the address of a line, with F32 * intermediate_size bytes per row."""
    rows = Strided(x, F32 * layer[0].hidden_size)
    gate_rows(kind, gated, rows, num_rows, _gate_weight(layer))
    multiply_converted(kind, rows, gated, num_rows, _down_weight(layer))


@jit
def _down_part(thread, kind, num_threads, counter, layer, x, gated, num_rows):
    rows = Strided(x, F32 * layer[0].hidden_size)
    multiply_share(kind, thread, num_threads, counter, rows, gated, num_rows, _down_weight(layer))


@jit(allocates=True)
def mlp_parallel(kind, layer, x, gated, num_rows, num_threads):
    """`mlp_rows` on all threads, each of which computes some channels of all rows."""
    _gate_parallel(kind, layer, gated, x, num_rows, num_threads)
    launch(_down_part, num_threads, (kind, num_threads, new_counter(), layer, x, gated, num_rows))
