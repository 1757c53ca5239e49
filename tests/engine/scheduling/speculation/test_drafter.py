"""Drafts are made where they pay off, by measured acceptance and measured step times."""

from __future__ import annotations

import random

import pytest

from pagemill.engine.plan import RowWork, StepPlan, StepResult
from pagemill.engine.scheduling.drafter import Drafter, accepted
from pagemill.engine.scheduling.request import Sequence
from pagemill.engine.scheduling.speculation.step_cost import StepCost
from tests.engine.scheduling.harness import make_request

SOURCE = list(range(100, 140))


def run_steps(drafter: Drafter, base: float, slope: float, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        plan = StepPlan(number, work=[RowWork(row, 10, 1) for row in range(size)])
        drafter.retire(plan, StepResult(number, [], forward_s=base + slope * size))


def copying() -> Sequence:
    """A sequence in the middle of repeating its prompt."""
    sequence = make_request("copy", [*SOURCE, 1, 2], max_tokens=64).sequences[0]
    sequence.output_token_ids = SOURCE[:8]
    return sequence


def follow(drafter: Drafter, sequence: Sequence, *, num_rows: int) -> list[int]:
    """The number of drafts, step by step, for a sequence that follows the predictions."""
    counts = []
    for token in SOURCE[8:30]:
        drafter.begin_step(num_rows)
        counts.append(len(drafter.draft(sequence, 64)))
        sequence.output_token_ids.append(token)
    return counts


def test_a_row_alone_drafts_as_far_as_it_may() -> None:
    drafter = Drafter(8)
    run_steps(drafter, base=0.020, slope=0.001, sizes=[1, 4, 8] * 20)
    assert follow(drafter, copying(), num_rows=1)[-1] == 8


def test_a_batch_whose_time_is_all_in_its_tokens_drafts_nothing() -> None:
    drafter = Drafter(8)
    run_steps(drafter, base=0.0, slope=0.001, sizes=[8, 16, 32] * 20)
    assert not any(follow(drafter, copying(), num_rows=32))


def test_predictions_that_fail_end_the_drafts_and_true_ones_bring_them_back() -> None:
    drafter, rng = Drafter(8), random.Random(0)
    run_steps(drafter, base=0.020, slope=0.002, sizes=[1, 4, 8] * 20)
    sequence = make_request("random", [rng.randrange(3) for _ in range(200)], max_tokens=900).sequences[0]
    counts = []
    for _ in range(400):
        drafter.begin_step(4)
        counts.append(len(drafter.draft(sequence, 64)))
        sequence.output_token_ids.append(rng.randrange(3, 3 + 50) if rng.random() < 0.5 else rng.randrange(3))
    assert sum(counts[-100:]) < sum(counts[:100])
    assert max(counts[-100:]) <= 1
    for _ in range(8):
        assert follow(drafter, copying(), num_rows=4)
    assert follow(drafter, copying(), num_rows=4)[-1] >= 6


def test_there_is_no_draft_without_room() -> None:
    drafter = Drafter(8)
    drafter.begin_step(1)
    assert drafter.draft(copying(), 0) == []
    assert len(drafter.draft(copying(), 3)) == 3


def test_a_slow_first_step_does_not_make_tokens_free() -> None:
    cost = StepCost()
    cost.observe(1, 1.8)
    for _ in range(60):
        cost.observe(8, 0.15)
        assert cost.slope > 0.15 / 200
    cost.observe(1, 60.0)
    assert cost.seconds(8) < 1.0


@pytest.mark.parametrize(("base", "slope"), [(0.02, 0.001), (0.001, 0.002), (0.05, 0.0)])
def test_the_line_through_the_steps_is_found(base: float, slope: float) -> None:
    cost, rng = StepCost(), random.Random(1)
    for _ in range(2000):
        size = rng.randint(1, 64)
        cost.observe(size, (base + slope * size) * rng.uniform(0.8, 1.2))
    assert cost.slope == pytest.approx(slope, rel=0.3, abs=3e-4)
    assert cost.seconds(32) == pytest.approx(base + slope * 32, rel=0.2)


def test_steps_of_one_size_leave_the_prior() -> None:
    cost = StepCost()
    for _ in range(50):
        cost.observe(16, 0.016)
    assert cost.slope == pytest.approx(0.016 / 32)


def test_tokens_are_accepted_up_to_the_first_that_was_not_drafted() -> None:
    result = StepResult(0, [[9], [1], [2], [7], [4]])
    assert accepted(result, 1, [1, 2, 3]) == ([1, 2, 7], None)
    assert accepted(result, 1, [5, 2, 3]) == ([1], None)
    assert accepted(result, 1, [1, 2, 7]) == ([1, 2, 7, 4], None)


def test_what_could_not_be_sampled_is_not_accepted() -> None:
    assert accepted(StepResult(0, [[1], [2]], invalid=frozenset({1})), 0, [1]) == ([1], None)
    assert accepted(StepResult(0, [[1], [2]], without_choice=frozenset({1})), 0, [1]) == ([1], None)
