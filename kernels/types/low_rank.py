"""The low-rank matrices of one linear layer's adapters, and the adapter of each row of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

NO_ADAPTER = -1
TILE_ROWS = 16
"""Maximum number of rows in a tile: the minimum of a GPU's matmul."""
ENTRY_NUMBERS = 4
"""Size of an entry. The last number is padding, so that each starts at a multiple of 16 bytes."""
_MOST_MULTIPLE = 16

Matrices = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in_features] and B [rank, width]: x A^T B is added to a row's part of the output.

Both are contiguous and start at a multiple of 16 bytes, as every allocation of torch does."""


@dataclass(slots=True)
class LowRankTable:
    """The adapters of a layer whose outputs are one part or several adjacent ones.

    Kernels locate the matrices by address. Replacing an adapter thus writes only three values per part, and
    adapters of different ranks need no padding.
    """

    entries: torch.Tensor
    """int64 [num_slots, num_parts, ENTRY_NUMBERS] on the layer's device: addresses of A and B, and the rank, 0: none.

    The last two dimensions are contiguous.
    """
    starts: torch.Tensor
    """int64 [num_parts + 1] on the layer's device: the start of each part in the outputs, and the end of the last."""
    max_rank: int
    """Maximum rank."""
    width_multiple: int
    """A power of two, up to 16, that divides the width of each part."""
    matrices: dict[int, list[Matrices | None]] = field(default_factory=dict)
    """Slot -> the matrices of each part; these references keep the addresses valid."""

    @classmethod
    def of_widths(cls, entries: torch.Tensor, widths: Sequence[int], max_rank: int) -> LowRankTable:
        """Return the table of a layer whose parts have these widths."""
        starts = torch.tensor([0, *accumulate(widths)], device=entries.device)
        return cls(entries, starts, max_rank, gcd(_MOST_MULTIPLE, *widths))

    @property
    def num_parts(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of a step's rows: their slots, and the rows sorted into tiles of one adapter each."""

    slots: torch.Tensor
    """int32 [num_rows]; `NO_ADAPTER`: none."""
    order: torch.Tensor
    """int32 [num_adapted]: the rows with an adapter, those of a slot together."""
    tiles: torch.Tensor
    """int32 [num_tiles, 3]: slot, first position in `order`, number of rows, up to `TILE_ROWS`."""


IntArray = npt.NDArray[np.int32]


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Return the largest number of tiles of a step: all are full, except one for each slot."""
    return min(num_rows, num_rows // TILE_ROWS + num_slots)


def tiled(slots: IntArray) -> tuple[IntArray, IntArray]:
    """Return `AdapterRows.order` and `AdapterRows.tiles` for the slots [num_rows] of a step."""
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots == NO_ADAPTER) :].astype(np.int32)
    tiles: list[tuple[int, int, int]] = []
    used, firsts, counts = np.unique(slots[order], return_index=True, return_counts=True)
    for slot, first, count in zip(used.tolist(), firsts.tolist(), counts.tolist(), strict=True):
        tiles += [
            (slot, first + begin, min(TILE_ROWS, count - begin)) for begin in range(0, count, TILE_ROWS)
        ]
    return order, np.array(tiles, dtype=np.int32).reshape(-1, 3)
