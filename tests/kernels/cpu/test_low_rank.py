"""Low-rank matmuls of adapters on the CPU, compared with float64."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import dispatch
from pagemill.kernels.types.low_rank import TILE_ROWS, tiled
from tests.kernels.low_rank_case import low_rank_case

MIXED = ([2, -1, 0, 1, 1, -1, 2, 0], [[8, 3], [64, 0], [1, 17]])


@pytest.mark.parametrize("face", ["cpu", "reference"])
@pytest.mark.parametrize("in_features", [16, 40, 67, 256])
@pytest.mark.parametrize("widths", [[16, 48], [7, 33]], ids=str)
def test_rows_of_several_adapters(face: dispatch.FaceName, in_features: int, widths: list[int]) -> None:
    slots, ranks = MIXED
    case = low_rank_case(slots, ranks, in_features=in_features, widths=widths)
    expected, untouched = case.expected(), case.out[[1, 5]].clone()
    with dispatch.override(face):
        dispatch.add_low_rank(case.out, case.x, case.table, case.rows)
    torch.testing.assert_close(case.out.double(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(case.out[[1, 5]], untouched), "a row without an adapter was touched"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    slots, ranks = MIXED
    case = low_rank_case(slots, ranks, in_features=64, widths=[32, 32], dtype=dtype)
    expected = case.expected()
    dispatch.add_low_rank(case.out, case.x, case.table, case.rows)
    torch.testing.assert_close(case.out.double(), expected, rtol=2e-2, atol=0.5)


def test_a_row_is_the_same_to_the_last_bit_in_any_batch() -> None:
    case = low_rank_case([0, 1] * 400, [[8, 3], [64, 5]], in_features=96, widths=[32, 96])
    alone = [low_rank_case([slot], [[8, 3], [64, 5]], in_features=96, widths=[32, 96]) for slot in (0, 1)]
    given, outs = case.x.clone(), case.out.clone()
    dispatch.add_low_rank(case.out, case.x, case.table, case.rows)
    for row in (0, 1, 398, 799):
        one = alone[row % 2]
        one.out.copy_(outs[row : row + 1])
        one.x.copy_(given[row : row + 1])
        dispatch.add_low_rank(one.out, one.x, case.table, one.rows)
        assert torch.equal(one.out[0], case.out[row])


def test_tiles_hold_rows_of_one_adapter() -> None:
    case = low_rank_case([1] * 20 + [-1, 0], [[1], [1]], in_features=16, widths=[16])
    order, tiles = tiled(case.rows.slots.numpy())
    assert order.tolist() == [21, *range(20)]
    assert tiles.tolist() == [[0, 0, 1], [1, 1, TILE_ROWS], [1, 1 + TILE_ROWS, 4]]
