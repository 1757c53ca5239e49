"""Persistent rows: what execution knows of every running sequence, and a step's tensors made from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.plan import NewRow, StepPlan
from kernels.metadata import AttentionMetadata

NULL_BLOCK = 0


@dataclass(slots=True)
class StepInputs:
    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    logits_indices: torch.Tensor  # [num_samples] int64, into the step's tokens
    metadata: AttentionMetadata


def bucket_size(count: int) -> int:
    """The padded size for `count` rows or tokens: 1, 2, 4, then multiples of 8, as CUDA graphs are captured."""
    if count <= 2:
        return count
    return 4 if count <= 4 else -(-count // 8) * 8


class InputBatch:
    """Row tables on the device (token ids, block ids) with a host side for what only the host needs.

    A row belongs to one sequence from the step that brings its `NewRow` until the row is given to another.
    Sampling writes tokens into the token table, so a row's next input is there before the host knows it.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        pad_to_bucket: bool,
        split_decodes: bool = True,
    ) -> None:
        """`split_decodes`: rows with one token are attended to by a kernel of their own, which is faster and adds
        up in another order than the one for prompts."""
        self._block_size = block_size
        self._device = device
        self._pad = pad_to_bucket
        self._split_decodes = split_decodes
        max_blocks = -(-max_model_len // block_size)
        # One column more: the last token of a full context is sampled, though never computed.
        self.token_table = torch.zeros(max_num_seqs, max_model_len + 1, dtype=torch.int64, device=device)
        self.block_table = torch.full(
            (max_num_seqs, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device
        )
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.rows: list[NewRow | None] = [None] * max_num_seqs

    def apply(self, plan: StepPlan) -> StepInputs:
        """Bring the rows up to date with the plan and lay out the step's tensors."""
        for new_row in plan.new_rows:
            self._enter(new_row)
        self._update_tables(plan)
        return self._lay_out(plan)

    def _enter(self, new: NewRow) -> None:
        self.rows[new.row] = new
        tokens = torch.tensor(new.token_ids, dtype=torch.int64)
        self.token_table[new.row, : len(tokens)] = tokens.to(self._device)
        blocks = torch.tensor(new.block_ids, dtype=torch.int32)
        self.block_table[new.row, : len(blocks)] = blocks.to(self._device)
        self._num_blocks[new.row] = len(blocks)

    def _update_tables(self, plan: StepPlan) -> None:
        """Scatter the plan's deltas: block ids appended or replaced, tokens forced by a grammar."""
        rows: list[int] = []
        columns: list[int] = []
        block_ids: list[int] = []
        forced: list[tuple[int, int, int]] = []
        for work in plan.work:
            for column, block_id in work.replaced_blocks:
                rows.append(work.row)
                columns.append(column)
                block_ids.append(block_id)
            if work.new_block_ids:
                first = int(self._num_blocks[work.row])
                for offset, block_id in enumerate(work.new_block_ids):
                    rows.append(work.row)
                    columns.append(first + offset)
                    block_ids.append(block_id)
                self._num_blocks[work.row] += len(work.new_block_ids)
            forced.extend((work.row, position, token) for position, token in work.forced_token_ids)
        if rows:
            index = torch.tensor([rows, columns, block_ids]).to(self._device)
            self.block_table[index[0], index[1]] = index[2].to(torch.int32)
        if forced:
            index = torch.tensor(forced).T.to(self._device)
            self.token_table[index[0], index[1]] = index[2]

    def _lay_out(self, plan: StepPlan) -> StepInputs:
        num_rows, num_tokens = len(plan.work), plan.num_tokens
        padded_rows = bucket_size(num_rows) if self._pad else num_rows
        padded_tokens = bucket_size(num_tokens) if self._pad else num_tokens
        padded_tokens = max(padded_tokens, num_tokens + (padded_rows - num_rows))

        rows = np.fromiter((work.row for work in plan.work), np.int64, num_rows)
        starts = np.fromiter((work.start for work in plan.work), np.int64, num_rows)
        query_lens = np.fromiter((work.num_tokens for work in plan.work), np.int64, num_rows)
        query_starts = np.zeros(padded_rows + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_starts[1 : num_rows + 1])
        query_starts[num_rows + 1 :] = num_tokens
        seq_lens = np.zeros(padded_rows, dtype=np.int32)
        seq_lens[:num_rows] = starts + query_lens
        row_of_token = np.repeat(rows, query_lens)
        positions = np.arange(num_tokens) - np.repeat(query_starts[:num_rows] - starts, query_lens)

        device_rows = torch.from_numpy(rows).to(self._device)
        token_rows = torch.from_numpy(row_of_token).to(self._device)
        token_positions = torch.from_numpy(positions).to(self._device)
        input_ids = self.token_table[token_rows, token_positions]
        max_blocks = -(-int(seq_lens.max(initial=1)) // self._block_size)
        tables = self.block_table[:, :max_blocks].index_select(0, device_rows)
        blocks = self.block_table[token_rows, token_positions // self._block_size].to(torch.int64)
        slots = blocks * self._block_size + token_positions % self._block_size
        if padded_tokens > num_tokens:
            extra = padded_tokens - num_tokens
            input_ids = torch.nn.functional.pad(input_ids, (0, extra))
            token_positions = torch.nn.functional.pad(token_positions, (0, extra))
            slots = torch.nn.functional.pad(slots, (0, extra), value=-1)
            tables = torch.nn.functional.pad(tables, (0, 0, 0, padded_rows - num_rows), value=NULL_BLOCK)
        lens_host = [*query_lens.tolist(), *([0] * (padded_rows - num_rows))]
        num_decode_rows = int((query_lens == 1).sum()) if self._split_decodes else 0
        if num_decode_rows == num_rows:
            num_decode_rows = padded_rows  # a padded row stands at a padded token of its own
        metadata = AttentionMetadata(
            block_tables=tables,
            query_start_loc=torch.from_numpy(query_starts).to(self._device),
            seq_lens=torch.from_numpy(seq_lens).to(self._device),
            slot_mapping=slots,
            query_lens_host=lens_host,
            seq_lens_host=seq_lens.tolist(),
            num_decode_rows=num_decode_rows,
            max_query_len=int(query_lens.max(initial=1)),
            max_seq_len=int(seq_lens.max(initial=1)),
        )
        indices = torch.tensor([sample.token_index for sample in plan.samples], dtype=torch.int64)
        return StepInputs(input_ids, token_positions, indices.to(self._device), metadata)
