"""A step's metadata for the attention operators, in addition to queries and caches. Tensors only."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagemill.kernels.types.recurrent import RecurrentStep


@dataclass(slots=True)
class AttentionMetadata:
    """One step's ragged batch over the paged cache.

    Rows with one query token come first (`num_decode_rows` of them), then rows with more. Every row's keys
    and values of this step are in the cache before attention reads it; query token i of a row with
    `query_len` tokens is at position `seq_len - query_len + i` and sees keys 0..that position.

    Padded rows (`seq_lens` 0) and padded tokens (`slot_mapping` -1) may be at the end of the batch. They
    write nothing, and their results are undefined.
    """

    block_tables: torch.Tensor  # [num_rows, max_blocks] int32; entries past a row's length are undefined
    slot_mapping: torch.Tensor  # [num_tokens] int64, block id * block_size + offset; -1 = padded
    query_start_loc: torch.Tensor  # [num_rows + 1] int32, prefix sums of the query lengths
    seq_lens: torch.Tensor  # [num_rows] int32, tokens in the cache after this step's writes
    query_lens_host: list[int]  # [num_rows] the same on the host, for grids and work lists
    seq_lens_host: list[int]  # [num_rows]
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    # Set by the prefill kernel's first call of the step and read by the calls of other layers: the (row,
    # query tile) of every program, by (query heads per KV head, tile height).
    work_lists: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    # Set in the same way for the CPU's decode kernel: [2, num_decode_rows] int32. The rows in an order where
    # rows that start with the same blocks are adjacent, and the number of blocks that each shares with the
    # previous one. Empty = none.
    sharing: torch.Tensor | None = field(default=None, init=False)
    others: list[AttentionMetadata] = field(default_factory=list)
    """The same step with the block tables of the other groups of layers, in order."""
    recurrent: RecurrentStep | None = None
    """The same step for layers with a state; None: the model does not have such layers."""

    def of_group(self, group: int) -> AttentionMetadata:
        """Return the step with the block tables of a group of layers."""
        return self.others[group - 1] if group else self

    def count_sharing_rows(self) -> int:
        """Return how many decode rows start with the same blocks as another; 0 if no kernel has computed it."""
        if self.sharing is None or not len(self.sharing):
            return 0
        joins = self.sharing[1] > 0  # never the first row
        return int((joins | joins.roll(-1)).sum())


def warm_up_metadata() -> AttentionMetadata:
    """A decode row and a row of two tokens, over one block and without writes: sufficient to compile a kernel."""
    return AttentionMetadata(
        block_tables=torch.zeros(2, 2, dtype=torch.int32),  # two entries, in case a block is one token
        query_start_loc=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([1, 2], dtype=torch.int32),
        slot_mapping=torch.full((3,), -1),
        query_lens_host=[1, 2],
        seq_lens_host=[1, 2],
        num_decode_rows=1,
        max_query_len=2,
        max_seq_len=2,
    )
