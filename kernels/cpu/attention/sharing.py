"""Find the rows of a step that read the same leading blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pagemill.kernels.types.metadata import AttentionMetadata

_MOST_COLUMNS = 32
"""Number of block-table columns to sort rows by. Common blocks are then compared one by one."""


def shared_blocks(tables: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
    """Return an order in which rows that start with the same blocks are adjacent, or None if no two rows do.

    Args:
        tables: [num_rows, any], block ids.

    Returns:
        [2, num_rows]: the rows in that order, and the number of leading entries that each shares with the previous row.
        It is 0 for the first row, and for rows that do not share their first block; those come last.
    """
    order = np.argsort(tables[:, 0], kind="stable")
    first_blocks = tables[order, 0]
    repeats = first_blocks[1:] == first_blocks[:-1]
    if not repeats.any():
        return None
    is_shared = np.append(repeats, False)
    is_shared[1:] |= repeats
    shared, num_columns = order[is_shared], tables.shape[1]
    columns = np.unique(np.linspace(num_columns - 1, 0, _MOST_COLUMNS).astype(np.int64))[::-1]
    shared = shared[np.lexsort(tables[np.ix_(shared, columns)].T)]
    sharing = np.zeros((2, len(tables)), dtype=np.int32)
    sharing[0] = np.append(shared, order[~is_shared])
    differs = tables[shared[1:]] != tables[shared[:-1]]
    sharing[1, 1 : len(shared)] = np.where(differs.any(axis=1), differs.argmax(axis=1), num_columns)
    return sharing


def sharing_of(metadata: AttentionMetadata) -> int:
    """Return the address of `shared_blocks` of the step's decode rows, or 0 if they share none. `metadata` owns it."""
    if metadata.sharing is None:
        found = shared_blocks(metadata.block_tables[: metadata.num_decode_rows].numpy())
        metadata.sharing = torch.empty(0, dtype=torch.int32) if found is None else torch.from_numpy(found)
    return metadata.sharing.data_ptr() if len(metadata.sharing) else 0
