"""The gated MLP of a decoder layer, fp32: down(silu(gate) * up), for rows that stay in one core's caches.

The matmul with the gate and up weights produces `silu(gate) * up` panel by panel. The doubled intermediate
size is never written, and the result is stored in lines, as the down matmul needs it. Values are identical to
those of `fp32.py` and `fused_rows.py` to the last bit.

`layer` is a record that `describe` in `layer/layer.py` fills. Its sizes are multiples: `hidden_size` of
LANES, `intermediate_size` of PANEL.
"""

from __future__ import annotations

import numpy as np

from pagemill.kernels.cpu.fused_rows import silu_times
from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import jit
from pagemill.kernels.cpu.jit.row import F32, VECTOR, line_in
from pagemill.kernels.cpu.jit.threads import launch
from pagemill.kernels.cpu.jit.vector import LANES
from pagemill.kernels.cpu.matmul.fp32 import (
    BLOCK_INPUTS,
    THREAD_BYTES,
    fit_the_cache,
    multiply_lined,
    multiply_lined_parallel,
)
from pagemill.kernels.cpu.matmul.fp32_panel import (
    SUMS_BYTES,
    Lined,
    Strided,
    Tiles,
    Weight,
    bias_of,
    line_up,
    multiply_panel,
    num_panels_of,
    sums_at,
)
from pagemill.kernels.cpu.matmul.fp32_tile import MOST_ROWS, first_row, num_tiles_of
from pagemill.kernels.cpu.matmul.work_sharing import BLOCK_ROWS, new_counter, panels_per_turn, take

_FEWEST_TILES = -(-42 // MOST_ROWS)


@jit
def _gate_pair(gated, x, tiles, weight, pair, following, memory):
    """Compute the 32 channels `pair` of silu(gate) * up, two lines per row. `memory` has THREAD_BYTES."""
    up = num_panels_of(weight) // 2 + pair
    gates, ups = sums_at(memory, tiles), sums_at(memory + SUMS_BYTES, tiles)
    none, expanded, end = Strided(0, 0), memory + 2 * SUMS_BYTES, weight.in_features
    multiply_panel(gates, bias_of(weight, pair), none, x, tiles, weight, pair, up, 0, 0, end, expanded, gates)
    multiply_panel(ups, bias_of(weight, up), none, x, tiles, weight, up, following, 0, 0, end, expanded, ups)
    first = first_row(tiles.low, tiles.num_rows)
    for tile in range(tiles.low, tiles.high):
        count = first_row(tile + 1, tiles.num_rows) - first
        lines = gated.rows + VECTOR * (gated.num_lines * first + 2 * pair * count)
        for row in range(count):
            gate, up_at = gates.rows + (first + row) * gates.stride, ups.rows + (first + row) * ups.stride
            low = silu_times(vector.load(gate), vector.load(up_at))
            high = silu_times(vector.load(gate + VECTOR), vector.load(up_at + VECTOR))
            vector.store(lines + VECTOR * row, low)
            vector.store(lines + VECTOR * (count + row), high)
        first += count


@jit
def _gate_blocks(first, last, gated, x, num_rows, weight, memory, line_memory):
    """Compute pairs first .. last - 1 of every row."""
    num_tiles, num_lines = num_tiles_of(num_rows), weight.in_features // LANES
    # Number of rows that fit in the L2 cache.
    at_once = max(_FEWEST_TILES, BLOCK_ROWS * BLOCK_INPUTS // (MOST_ROWS * weight.in_features))
    at_once = min(at_once, BLOCK_ROWS // MOST_ROWS)
    for low in range(0, num_tiles, at_once):
        tiles = Tiles(low, min(low + at_once, num_tiles), num_rows)
        lines = Lined(line_in(line_memory) - VECTOR * num_lines * first_row(low, num_rows), num_lines)
        line_up(lines, x, tiles)
        for pair in range(first, last):
            _gate_pair(gated, lines, tiles, weight, pair, pair + 1, line_in(memory))


@jit
def _line_bytes(num_rows, weight):
    """Bytes of the rows of x, in lines, that `_gate_blocks` processes at a time."""
    most = max(BLOCK_ROWS * BLOCK_INPUTS, _FEWEST_TILES * MOST_ROWS * weight.in_features)
    return F32 * min(most, num_rows * weight.in_features) + VECTOR


@jit(allocates=True)
def gate_rows(gated, x, num_rows, weight):
    """gated = silu(gate) * up of every row of x (`Strided`), on one thread; `gated` is `Lined`."""
    memory, line_memory = (
        np.empty(THREAD_BYTES + VECTOR, np.uint8),
        np.empty(_line_bytes(num_rows, weight), np.uint8),
    )
    _gate_blocks(0, num_panels_of(weight) // 2, gated, x, num_rows, weight, memory, line_memory)


@jit
def _take_pairs(counter, num_threads, gated, x, num_rows, weight, memory, line_memory):
    lines, num_pairs = Lined(line_in(line_memory), weight.in_features // LANES), num_panels_of(weight) // 2
    tiles, per_turn = Tiles(0, num_tiles_of(num_rows), num_rows), panels_per_turn(num_pairs, num_threads)
    line_up(lines, x, tiles)
    num_turns = (num_pairs + per_turn - 1) // per_turn
    turn = take(line_in(counter))
    while turn < num_turns:
        next_turn = take(line_in(counter))
        last = min((turn + 1) * per_turn, num_pairs)
        for pair in range(turn * per_turn, last):
            following = pair + 1 if pair + 1 < last else next_turn * per_turn
            _gate_pair(gated, lines, tiles, weight, pair, following, line_in(memory))
        turn = next_turn


@jit(allocates=True)
def _gate_part(thread, num_threads, counter, layer, gated, x, num_rows):
    """One thread's part: pairs are taken dynamically if x fits the L2 cache; otherwise shares are fixed."""
    weight, lines, rows = _gate_weight(layer), _gated_lines(layer, gated), _hidden_rows(layer, x)
    memory, line_memory = (
        np.empty(THREAD_BYTES + VECTOR, np.uint8),
        np.empty(_line_bytes(num_rows, weight), np.uint8),
    )
    if fit_the_cache(num_rows, weight.in_features):
        _take_pairs(counter, num_threads, lines, rows, num_rows, weight, memory, line_memory)
    else:
        num_pairs = num_panels_of(weight) // 2
        first, last = num_pairs * thread // num_threads, num_pairs * (thread + 1) // num_threads
        _gate_blocks(first, last, lines, rows, num_rows, weight, memory, line_memory)


@jit
def _gate_weight(layer):
    gate_up, bias, kind = layer[0].gate_up, layer[0].gate_up_bias, layer[0].gate_up_format
    return Weight(gate_up, kind, bias, 2 * layer[0].intermediate_size, layer[0].hidden_size)


@jit
def _gated_lines(layer, gated):
    return Lined(gated, layer[0].intermediate_size // LANES)


@jit
def _hidden_rows(layer, address):
    return Strided(address, F32 * layer[0].hidden_size)


@jit
def mlp_rows(layer, x, gated, num_rows):
    """x = mlp(x) on one thread; `gated` is the address of a line, with F32 * intermediate_size bytes per row."""
    size, inner = layer[0].hidden_size, layer[0].intermediate_size
    rows, lines = _hidden_rows(layer, x), _gated_lines(layer, gated)
    gate_rows(lines, rows, num_rows, _gate_weight(layer))
    down = Weight(layer[0].down, layer[0].down_format, layer[0].down_bias, size, inner)
    multiply_lined(rows, lines, num_rows, down)


@jit(allocates=True)
def mlp_parallel(layer, x, gated, num_rows, num_threads):
    """`mlp_rows` on all threads, each of which computes some channels of all rows."""
    size, inner = layer[0].hidden_size, layer[0].intermediate_size
    launch(_gate_part, num_threads, (num_threads, new_counter(), layer, gated, x, num_rows))
    multiply_lined_parallel(
        x, gated, layer[0].down, layer[0].down_format, layer[0].down_bias, num_rows, size, inner, num_threads
    )
