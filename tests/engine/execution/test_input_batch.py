"""A step's tensors compared with its plan, row by row."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from pagemill.engine.execution.input_batch import InputBatch, StepInputs, bucket_size
from pagemill.engine.execution.staging import DirectTransfer
from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan
from pagemill.engine.sampling_params import SamplingParams

BLOCK_SIZE, MAX_LEN, NUM_ROWS = 4, 64, 12


class Oracle:
    """The rows as plain lists."""

    def __init__(self) -> None:
        self.tokens: dict[int, dict[int, int]] = defaultdict(dict)
        self.blocks: dict[int, list[int]] = {}

    def apply(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self.tokens[new.row] = dict(enumerate(new.token_ids))
            self.blocks[new.row] = list(new.block_ids)
        for work in plan.work:
            for column, block in work.replaced_blocks:
                self.blocks[work.row][column] = block
            self.blocks[work.row] += work.new_block_ids
            self.tokens[work.row].update(work.forced_token_ids)

    def check(self, plan: StepPlan, inputs: StepInputs, padding: int) -> None:
        places = [(w.row, p) for w in plan.work for p in range(w.start, w.start + w.num_tokens)]
        slots = [self.blocks[r][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for r, p in places]
        metadata = inputs.metadata
        assert inputs.input_ids.tolist() == [self.tokens[r][p] for r, p in places] + [0] * padding
        assert inputs.positions.tolist() == [p for _, p in places] + [0] * padding
        assert metadata.slot_mapping.tolist() == slots + [-1] * padding
        assert metadata.slot_mapping.dtype is inputs.positions.dtype is torch.int64
        assert metadata.block_tables.dtype is metadata.seq_lens.dtype is torch.int32
        for table, work in zip(metadata.block_tables.tolist(), plan.work, strict=False):
            num_blocks = -(-(work.start + work.num_tokens) // BLOCK_SIZE)
            assert table[:num_blocks] == self.blocks[work.row][:num_blocks]
        lengths = [w.start + w.num_tokens for w in plan.work]
        assert metadata.seq_lens.tolist()[: len(lengths)] == metadata.seq_lens_host[: len(lengths)] == lengths
        samples = [(s.token_index, s.row, s.position) for s in plan.samples]
        found = (inputs.logits_indices, inputs.sample_rows, inputs.sample_positions)
        assert [*zip(*(tensor.tolist() for tensor in found), strict=True)] == samples


def new_row(row: int, num_tokens: int, blocks: list[int]) -> NewRow:
    tokens = [100 * row + i for i in range(num_tokens)]
    return NewRow(row, f"r{row}", 0, tokens, num_tokens, blocks, SamplingParams(), seed=row)


@pytest.mark.parametrize("pad", [False, True])
def test_tables_and_slots_follow_the_plans(pad: bool) -> None:
    batch = InputBatch(
        max_num_seqs=NUM_ROWS, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, device=torch.device("cpu"),
        pad_to_bucket=pad, transfer=DirectTransfer(torch.device("cpu")),
    )  # fmt: skip
    plans = [
        StepPlan(0, new_rows=[new_row(3, 6, [9, 4]), new_row(0, 1, [30])],
                 work=[RowWork(0, 0, 1), RowWork(3, 0, 6)], samples=[Sample(0, 0, 1), Sample(3, 6, 6)]),
        # Row 0 is unchanged; row 3 continues with one more block and three forced tokens.
        StepPlan(1, work=[RowWork(0, 0, 1), RowWork(3, 6, 3, [17], forced_token_ids=[(6, 50), (7, 55), (8, 56)])]),
        # A block is replaced, and another appended; a row is assigned to another sequence.
        StepPlan(2, new_rows=[new_row(0, 9, [1, 2, 3])],
                 work=[RowWork(3, 8, 5, [21], [(2, 40)], [(n, n) for n in range(9, 13)]), RowWork(0, 4, 5)],
                 samples=[Sample(0, 9, 9), Sample(0, 9, 9)]),
        # No row changes.
        StepPlan(3, work=[RowWork(3, 12, 1), RowWork(0, 8, 1)], samples=[Sample(3, 0, 13)]),
    ]  # fmt: skip
    oracle = Oracle()
    for plan in plans:
        oracle.apply(plan)
        inputs = batch.lay_out(batch.stage(plan))
        padding = max(bucket_size(plan.num_tokens) - plan.num_tokens, 0) if pad else 0
        assert len(inputs.positions) >= plan.num_tokens + padding
        oracle.check(plan, inputs, len(inputs.positions) - plan.num_tokens)
