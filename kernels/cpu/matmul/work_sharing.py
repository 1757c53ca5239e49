"""Work that threads take piece by piece, instead of a fixed share each.

Two CPU cores of one machine are rarely equally fast from one millisecond to the next, because a neighbor,
another process or the other hyperthread uses part of one. With fixed shares all threads wait for the slowest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import jit
from pagemill.kernels.cpu.jit.row import VECTOR
from pagemill.kernels.cpu.matmul.fp32_tile import MOST_ROWS

# Both are multiples of the tile height.
BLOCK_ROWS = 140 // MOST_ROWS * MOST_ROWS
"""Maximum number of rows of a matmul processed together: the rows of x that fit the L2 cache."""
FEWEST_ROWS = -(-28 // MOST_ROWS) * MOST_ROWS
"""Minimum number of rows in a block, because each block reads all weights."""
_TURNS = 8


@jit(allocates=True)
def new_counter():
    """Return a counter at 0, alone in its cache line. Its address is `line_in` this array."""
    return np.zeros(2 * VECTOR, np.uint8)  # not in a parallel kernel, which would write the zeros in parallel


@intrinsic
def take(typing_context: Any, counter: Any) -> Any:
    """Return the next value of the counter at this address (int64). Only one thread receives each value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], cgutils.ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, cgutils.ir.IntType(64)(1), "monotonic")

    return types.int64(types.int64), generate


@jit
def are_rows_taken(num_rows, num_threads):
    """Return True if threads take blocks of rows: each then reads no more weights than with separate panels."""
    return num_rows > BLOCK_ROWS * (num_threads - 1)


@jit(allocates=True)
def plan_blocks(num_rows, num_threads):
    """Return bounds of row blocks, which threads process one at a time; the last is `num_rows`.

    Blocks shrink towards the end, so that no thread is left alone with a large one. Bounds are tile bounds.
    """
    bounds = np.empty(num_rows // FEWEST_ROWS + 2, np.int64)
    first, count = 0, 0
    while first < num_rows:
        bounds[count] = first
        left = num_rows - first
        size = min(BLOCK_ROWS, max(FEWEST_ROWS, left // num_threads // MOST_ROWS * MOST_ROWS))
        if left < size + FEWEST_ROWS:  # the remainder would be too small for a block
            size = left if left <= BLOCK_ROWS else (left // 2 + MOST_ROWS - 1) // MOST_ROWS * MOST_ROWS
        first += size
        count += 1
    bounds[count] = num_rows
    return bounds[: count + 1]


@jit
def panels_per_turn(num_panels, num_threads):
    """Return the number of panels per turn: small enough for several turns per thread and balanced completion."""
    return max(1, num_panels // (_TURNS * num_threads))


@jit(allocates=True)
def plan_turns(costs, num_threads):
    """Return bounds of task groups, which threads process one at a time; the last is the number of tasks.

    `costs[n]` is the total cost of the first n tasks. Groups are contiguous, and shrink towards the end.
    """
    total = costs[-1]
    bounds = np.zeros(len(costs), np.int64)
    count, done = 0, 0
    while bounds[count] < len(costs) - 1:
        done += max((total - done) // (2 * num_threads), total // (_TURNS * num_threads * 4), 1)
        last = np.searchsorted(costs, min(done, total))
        bounds[count + 1] = max(last, bounds[count] + 1)
        done = costs[bounds[count + 1]]
        count += 1
    return bounds[: count + 1]
