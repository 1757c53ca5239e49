"""A step's plan as sent to the other ranks: only the changes to their rows and blocks.

Only the rank that samples needs a sequence's request, sampling and grammar. A prompt is sent once, when it
enters its row. Sampled tokens are sent from device to device instead (`RankGroup.broadcast`), because they might
not be known yet when the next plan is sent.
"""

from __future__ import annotations

import pickle

from pagemill.engine.plan import NewRow, RowWork, Sample, StepPlan
from pagemill.engine.sampling_params import SamplingParams

_PROTOCOL = 5
_ANY_PARAMS = SamplingParams()


def encode(plan: StepPlan) -> bytes:
    """Encode as plain tuples: a dataclass would add its fields' names for every row."""
    return pickle.dumps(
        (
            plan.step_id,
            [(new.row, new.token_ids, new.num_prompt_tokens, new.block_ids) for new in plan.new_rows],
            plan.host_stores,
            plan.host_loads,
            plan.block_copies,
            [
                (
                    work.row,
                    work.start,
                    work.num_tokens,
                    work.new_block_ids,
                    work.replaced_blocks,
                    work.forced_token_ids,
                    work.num_prompt_logprobs,
                    work.scored_from,
                    work.reads,
                )
                for work in plan.work
            ],
            [(sample.row, sample.token_index, sample.position) for sample in plan.samples],
        ),
        _PROTOCOL,
    )


def decode(message: bytes) -> StepPlan:
    """Return the plan for `ModelRunner.launch` on the other ranks."""
    step_id, new_rows, host_stores, host_loads, block_copies, work, samples = pickle.loads(message)
    return StepPlan(
        step_id,
        new_rows=[
            NewRow(row, "", 0, token_ids, num_prompt_tokens, block_ids, _ANY_PARAMS, 0)
            for row, token_ids, num_prompt_tokens, block_ids in new_rows
        ],
        host_stores=host_stores,
        host_loads=host_loads,
        block_copies=block_copies,
        work=[RowWork(*fields) for fields in work],
        samples=[Sample(*fields) for fields in samples],
    )
