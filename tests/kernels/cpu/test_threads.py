"""Kernels that all threads run: every share once, with unchanged arguments."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from pagemill.kernels.cpu.jit.compiler import jit
from pagemill.kernels.cpu.jit.threads import launch, launch_rows


@jit
def _note(thread, seen, factor, numbers):
    seen[thread] += factor * numbers[thread % len(numbers)]


@jit
def _note_all(num_threads, seen, factor, numbers):
    launch(_note, num_threads, (seen, factor, numbers))


@jit
def _count_rows(first, last, seen, amount):
    for row in range(first, last):
        seen[row] += amount


@jit
def _count_all_rows(num_threads, num_rows, *arguments):
    launch_rows(_count_rows, num_threads, num_rows, arguments)


@jit(allocates=True)
def _take_too_much(thread, size, out):
    out[thread] = len(np.empty(size, np.uint8))


@jit
def _take_all(num_threads, size, out):
    launch(_take_too_much, num_threads, (size, out))


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_every_thread_is_called_once(num_threads):
    seen = np.zeros(num_threads + 1)
    _note_all(num_threads, seen, 0.5, np.array([2, 4]))
    assert seen.tolist() == [1.0 if thread % 2 == 0 else 2.0 for thread in range(num_threads)] + [0.0]


@pytest.mark.parametrize(("num_threads", "num_rows"), [(1, 5), (2, 5), (3, 0), (4, 3), (16, 100)])
def test_every_row_is_in_one_share(num_threads, num_rows):
    seen = np.zeros(num_rows + 1, np.int64)
    _count_all_rows(num_threads, num_rows, seen, 3)
    assert seen.tolist() == [3] * num_rows + [0]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_thread_without_memory_fails_the_call(num_threads):
    out = np.zeros(num_threads, np.int64)
    with pytest.raises(MemoryError):
        _take_all(num_threads, 1 << 60, out)
    _take_all(num_threads, 10, out)
    assert (out == 10).all()
