"""Low-rank matmuls of adapters, run by Triton's interpreter, compared with float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagemill.kernels import dispatch
from pagemill.kernels.gpu.tuning import low_rank_splits
from tests.kernels.low_rank_case import low_rank_case


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("in_features", "widths"), [(64, [64]), (96, [48, 16, 16]), (40, [70, 9])], ids=str)
def test_rows_of_several_adapters(dtype: torch.dtype, in_features: int, widths: list[int]) -> None:
    ranks = [[8] * len(widths), [100] + [0] * (len(widths) - 1), [1 + part for part in range(len(widths))]]
    slots = [1] * 18 + [-1, 0, 2, 0, -1, 2]
    case = low_rank_case(slots, ranks, in_features=in_features, widths=widths, dtype=dtype)
    expected, untouched = case.expected(), case.out[[18, 22]].clone()
    with dispatch.override("triton"):
        dispatch.add_low_rank(case.out, case.x, case.table, case.rows)
    scale = float(expected.abs().max())
    tolerance = 1e-5 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(case.out.double() / scale, expected / scale, rtol=0, atol=tolerance)
    assert torch.equal(case.out[[18, 22]], untouched)


def test_split_inputs_and_tiles_without_rows() -> None:
    """Few rows, whose inputs are split, as in a captured graph: with more tiles than the step has."""
    case = low_rank_case([0, -1, 0], [[20, 8], [0, 40]], in_features=600, widths=[32, 16])
    rows = case.rows
    empty = replace(rows, tiles=rows.tiles.new_zeros(2, 3))
    padded = replace(rows, tiles=torch.cat([rows.tiles, empty.tiles[:1]]))
    assert low_rank_splits(1, 600, case.x.device) == (3, 256)
    assert low_rank_splits(len(padded.tiles) * 2, 600, case.x.device) == (1, 640)
    expected, before = case.expected(), case.out.clone()
    with dispatch.override("triton"):
        dispatch.add_low_rank(case.out, case.x, case.table, empty)
        assert torch.equal(case.out, before)
        for given in (rows, padded):
            case.out.copy_(before)
            dispatch.add_low_rank(case.out, case.x, case.table, given)
            torch.testing.assert_close(case.out.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_step_without_adapters() -> None:
    case = low_rank_case([-1, -1], [[4]], in_features=16, widths=[16])
    before = case.out.clone()
    with dispatch.override("triton"):
        dispatch.add_low_rank(case.out, case.x, case.table, case.rows)
    assert torch.equal(case.out, before)
