"""The order in which a matmul's programs compute the tiles of its output."""

from __future__ import annotations

import triton
import triton.language as tl

# Adjacent programs share weights and rows in the L2 cache: this many tiles of rows are grouped.
TILE_GROUP = 8


@triton.jit
def tile_of_program(row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return this program's (tile of rows, tile of columns), column by column within a group of row tiles."""
    group = tl.program_id(0) // (GROUP * column_tiles)
    in_group = tl.program_id(0) % (GROUP * column_tiles)
    group_size = tl.minimum(row_tiles - group * GROUP, GROUP)
    return group * GROUP + in_group % group_size, in_group // group_size
