"""Work that threads take piece by piece: every piece is processed once, and pieces do not exceed their limit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("numba")

from hypothesis import given
from hypothesis import strategies as st

from pagemill.kernels.cpu.jit.compiler import jit, use_torch_threads
from pagemill.kernels.cpu.jit.row import line_in
from pagemill.kernels.cpu.jit.threads import launch
from pagemill.kernels.cpu.matmul.fp32_tile import MOST_ROWS
from pagemill.kernels.cpu.matmul.work_sharing import (
    BLOCK_ROWS,
    FEWEST_ROWS,
    new_counter,
    plan_blocks,
    plan_turns,
    take,
)

pytestmark = pytest.mark.usefixtures("two_threads")


@jit
def _take_all(thread, counter, takers):
    number = take(line_in(counter))
    while number < takers.shape[1]:
        takers[thread, number] += 1
        number = take(line_in(counter))


@jit(allocates=True)
def _share_out(takers, num_threads):
    launch(_take_all, num_threads, (new_counter(), takers))


def test_each_number_is_given_to_one_thread() -> None:
    num_threads = use_torch_threads()
    assert num_threads == 2
    for _ in range(20):
        takers = np.zeros((num_threads, 200_000), np.int64)
        _share_out(takers, num_threads)
        assert (takers.sum(axis=0) == 1).all()


@pytest.mark.slow
@given(st.integers(1, 5000), st.integers(1, 64))
def test_blocks_cover_the_rows(num_rows: int, num_threads: int) -> None:
    bounds = plan_blocks(num_rows, num_threads)
    sizes = np.diff(bounds)
    assert (bounds[0], bounds[-1]) == (0, num_rows)
    assert (sizes > 0).all()
    assert (sizes <= BLOCK_ROWS).all()
    assert len(sizes) == 1 or (sizes >= FEWEST_ROWS).all()
    assert (bounds[:-1] % MOST_ROWS == 0).all()
    if num_threads > 1 and len(sizes) > 1:  # no thread has much work left alone
        assert sizes[-1] < 2 * FEWEST_ROWS


@pytest.mark.slow
@given(st.lists(st.integers(1, 10_000), max_size=300), st.integers(1, 64))
def test_turns_cover_the_tasks(costs: list[int], num_threads: int) -> None:
    totals = np.concatenate([[0], np.cumsum(costs, dtype=np.int64)]).astype(np.int64)
    bounds = plan_turns(totals, num_threads)
    assert (bounds[0], bounds[-1]) == (0, len(costs))
    assert (np.diff(bounds) > 0).all()
    most = max(totals[-1] // (2 * num_threads), 1)
    for first, last in pairwise(bounds):
        # Within half of a thread's share, except the task that exceeds it.
        assert totals[last - 1] - totals[first] <= most
