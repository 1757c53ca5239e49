"""The rows of a mixture of experts, run by Triton's interpreter, compared with plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.kernels import dispatch, experts

_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
_DTYPES = pytest.mark.parametrize("dtype", list(_TOLERANCE), ids=lambda dtype: str(dtype)[6:])


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_sort(data: st.DataObject) -> None:
    """Exactly as the reference; some experts have no rows."""
    num_experts = data.draw(st.integers(1, 20))
    top_k = data.draw(st.integers(1, min(8, num_experts)))
    num_rows, size = data.draw(st.sampled_from([1, 7, 60])), data.draw(st.sampled_from([1, 37, 1500]))
    first = data.draw(st.integers(0, num_experts - top_k))
    indices = torch.stack([first + torch.randperm(num_experts - first)[:top_k] for _ in range(num_rows)])
    x = torch.randn(num_rows, 2 * size)[:, :size]
    with dispatch.override("triton"):
        found = dispatch.sort_by_expert(x, indices, num_experts)
    expected = experts.sort_by_expert(x, indices, num_experts)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


def test_sort_of_many_choices() -> None:
    """More than one block of a program, and a last block that is not full."""
    indices = torch.stack([torch.randperm(16)[:8] for _ in range(1300)])
    x = torch.randn(1300, 3).half()
    with dispatch.override("triton"):
        found = dispatch.sort_by_expert(x, indices, 16)
    assert all(map(torch.equal, found, experts.sort_by_expert(x, indices, 16)))


def test_without_rows() -> None:
    with dispatch.override("triton"):
        rows, places, offsets = dispatch.sort_by_expert(
            torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.int64), 3
        )
        out = dispatch.combine_experts(rows, places, torch.zeros(0, 2))
        assert dispatch.clamped_swiglu(torch.zeros(0, 8), 1.0, 1.0).shape == (0, 4)
    assert rows.shape == out.shape == (0, 8)
    assert offsets.tolist() == [0] * 4


@_DTYPES
@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("size", [37, 1500])
def test_combination(top_k: int, size: int, dtype: torch.dtype) -> None:
    rows, places = torch.randn(5 * top_k, size).to(dtype), torch.randperm(5 * top_k)
    weights = torch.rand(top_k, 5).t() if top_k == 3 else torch.rand(5, top_k).to(dtype)
    with dispatch.override("triton"):
        out = dispatch.combine_experts(rows, places, weights)
    expected = experts.combine_experts(rows.double(), places, weights)
    assert out.dtype is dtype
    torch.testing.assert_close(
        out.double(), expected.double(), rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype]
    )


@_DTYPES
@pytest.mark.parametrize("size", [3, 90, 2100])
def test_clamped_swiglu(size: int, dtype: torch.dtype) -> None:
    """Gates and ups beyond the limit, some of them far, and NaN."""
    x = (torch.randn(9, 2 * size) * 5).to(dtype)
    x[7], x[8], x[6, 0], x[5, size] = 1e4, -1e4, torch.nan, torch.nan
    with dispatch.override("triton"):
        found = dispatch.clamped_swiglu(x, 1.702, 7.0)
    expected = experts.clamped_swiglu(x, 1.702, 7.0)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=_TOLERANCE[dtype], atol=1e-5, equal_nan=True)
