"""Matmuls of rows sorted by expert, run by Triton's interpreter, compared with float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagemill.kernels import dispatch, experts
from pagemill.kernels.gpu.expert_matmul import most_tiles
from pagemill.kernels.gpu.tuning import EXPERT_MATMUL_TILES

_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
_COUNTS = [
    [1],
    [0, 0, 1],
    [40, 0, 0, 0],
    [0, 16, 17, 0, 33, 1, 0],
    [20, 30, 0, 25],
    [170, 0, 130, 16],  # a mean above 32 rows
]


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


# The interpreter cannot multiply bf16 tiles: `make compiled-ir` does.
@pytest.mark.parametrize("dtype", list(_TOLERANCE), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("counts", _COUNTS, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(70, 83), (64, 128)])
def test_matmul(counts: list[int], out_features: int, in_features: int, dtype: torch.dtype) -> None:
    weight = torch.randn(len(counts), out_features, in_features).to(dtype)
    bias = torch.randn(len(counts), out_features).to(dtype) if in_features == 83 else None
    x, offsets = torch.randn(sum(counts), 2 * in_features).to(dtype)[:, :in_features], offsets_of(counts)
    with dispatch.override("triton"):
        out = dispatch.expert_matmul(x, weight, offsets, bias)
        assert len(dispatch.expert_matmul(x[:0], weight, 0 * offsets, bias)) == 0
    assert out.dtype is dtype
    assert out.is_contiguous()
    wide = None if bias is None else bias.double()
    expected = experts.expert_matmul(x.double(), weight.double(), offsets, wide)
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double() / scale, expected / scale, rtol=0, atol=_TOLERANCE[dtype])


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=40))
def test_the_grid_has_enough_tiles(counts: list[int]) -> None:
    for _, _, tile in EXPERT_MATMUL_TILES:
        needed = sum(-(-count // tile.block_m) for count in counts)
        assert needed <= most_tiles(sum(counts), len(counts), tile.block_m)
