"""Work that threads take piece by piece, instead of a fixed share each.

Two processors of one machine are rarely equally fast from one millisecond to the next: a neighbor, another process
or the other half of a core takes its part of one of them. With fixed shares all wait for the slowest.
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

# Both are whole tiles.
BLOCK_ROWS = 140 // MOST_ROWS * MOST_ROWS
"""Maximum number of rows of a matmul processed together: those of x that fit in the second-level cache."""
FEWEST_ROWS = -(-28 // MOST_ROWS) * MOST_ROWS
"""Blocks get no smaller: all weights pass by for each."""
_TURNS = 8


@jit(allocates=True)
def new_counter():
    """A counter at 0, alone in its cache line: `line_in` this array is its address."""
    return np.zeros(2 * VECTOR, np.uint8)  # not in a parallel kernel, which would write the zeros in parallel


@intrinsic
def take(typing_context: Any, counter: Any) -> Any:
    """The next value of the counter at this address (int64): each is returned to only one thread."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], cgutils.ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, cgutils.ir.IntType(64)(1), "monotonic")

    return types.int64(types.int64), generate


@jit
def are_rows_taken(num_rows, num_threads):
    """Return True if threads take blocks of rows, which costs each no more weight traffic than its own panels would."""
    return num_rows > BLOCK_ROWS * (num_threads - 1)


@jit(allocates=True)
def plan_blocks(num_rows, num_threads):
    """Bounds of blocks of rows, which threads process one at a time; ends with `num_rows`.

    The blocks shrink towards the end, so that no thread is left alone with a large one. Bounds are those of tiles.
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
    """Return the number of panels per turn of a thread: small enough for several turns each and balanced completion."""
    return max(1, num_panels // (_TURNS * num_threads))


@jit(allocates=True)
def plan_turns(costs, num_threads):
    """Bounds of groups of tasks, which threads process one at a time; ends with the number of tasks.

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
