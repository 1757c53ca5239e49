"""The dependencies of a row's bits in matmuls of bfloat16 values and of 8-bit integers."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import grouped_int8
from pagemill.kernels.cpu.matmul import bf16, int8
from tests.kernels.cpu.operands import activations, make

pytestmark = [
    pytest.mark.usefixtures("two_threads"),
    pytest.mark.parametrize("kernel", [pytest.param(bf16, id="bf16"), pytest.param(int8, id="int8")]),
]


def test_a_row_depends_neither_on_its_neighbours_nor_on_the_threads(kernel):
    torch.manual_seed(42)
    _, packed, bias = make(kernel, 800, 200)
    x = activations(300, 800)
    whole = kernel.multiply(x, packed, bias, 200)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in [*range(1, 31), 56, 57, 141]:
            first = (37 * num_rows) % (301 - num_rows)
            part = kernel.multiply(x[first : first + num_rows], packed, bias, 200)
            assert torch.equal(part, whole[first : first + num_rows])


def test_rows_that_do_not_fit_the_cache_together(kernel):
    """Blocks of rows: many rows of many inputs."""
    torch.manual_seed(42)
    _, packed, bias = make(kernel, 9000, 33)
    x = activations(120, 9000)
    whole = kernel.multiply(x, packed, bias, 33)
    for row in (0, 57, 58, 119):
        assert torch.equal(kernel.multiply(x[row : row + 1], packed, bias, 33), whole[row : row + 1])


@pytest.mark.parametrize("in_features", [64, 100])
def test_what_is_not_finite_stays_in_its_row(kernel, in_features):
    torch.manual_seed(42)
    weight, packed, bias = make(kernel, in_features, 40)
    x = activations(20, in_features)
    clean = kernel.multiply(x, packed, bias, 40)
    x[3, 5], x[11, 0], x[17, in_features - 1] = torch.nan, -torch.inf, torch.inf
    out = kernel.multiply(x, packed, bias, 40)
    bad = [3, 11, 17]
    assert out[3].isnan().all()
    assert not out[bad].isfinite().any()
    if kernel is int8:
        assert out[bad].isnan().all()
        twin = grouped_int8.multiply(x, *grouped_int8.quantize(weight), bias[:40])
        assert twin[bad].isnan().all()
    others = [row for row in range(20) if row not in bad]
    assert torch.equal(out[others], clean[others])


def test_zeros_and_numbers_at_the_ends_of_the_range(kernel):
    _, packed, bias = make(kernel, 70, 3)
    bias[:3] = 0.0
    x = torch.zeros(4, 70)
    x[1], x[2, 69], x[3, 0] = 1e-38, 1e-45, 1e37
    out = kernel.multiply(x, packed, bias, 3)
    assert (out[:1] == 0.0).all()
    assert out.isfinite().all()


def test_no_rows(kernel):
    _, packed, bias = make(kernel, 8, 40)
    assert kernel.multiply(torch.empty(0, 8), packed, bias, 40).shape == (0, 40)
