"""The largest value of a row and its position, compared with torch's: ties, zeros of both signs, NaN and infinities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from pagemill.kernels.cpu.sampling import argmax as cpu_argmax
from pagemill.kernels.selection import largest

INF, NAN = torch.inf, torch.nan


def make_rows(num_rows: int, size: int, seed: int, *, levels: int, special: float | None) -> torch.Tensor:
    """Return rows in a non-contiguous tensor; `levels`: the number of different values, to create ties."""
    torch.manual_seed(seed)
    wide = torch.randn(num_rows, size + 5)
    if levels:
        wide = torch.randint(-levels, levels, wide.shape) / 2
        wide[torch.rand(wide.shape) < 0.3] *= -1  # zeros of both signs
    if special is not None:
        wide[torch.rand(wide.shape) < 2 / size] = special
        if special != special:
            wide[torch.rand(wide.shape) < 1 / size] = -torch.tensor(NAN)
    return wide[:, 3 : 3 + size]


def assert_same(rows: torch.Tensor) -> None:
    peaks, places = cpu_argmax.largest(rows)
    expected_peaks, expected_places = rows.max(dim=-1)
    assert torch.equal(places, expected_places)
    assert torch.equal(peaks.isnan(), expected_peaks.isnan())
    is_number = ~peaks.isnan()
    assert torch.equal(peaks[is_number].view(torch.int32), expected_peaks[is_number].view(torch.int32))


pytestmark = pytest.mark.usefixtures("two_threads")


@settings(max_examples=100, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    size=st.one_of(st.integers(1, 70), st.integers(1000, 5000)),
    seed=st.integers(0, 2**31),
    levels=st.sampled_from([0, 1, 3, 40]),
    special=st.sampled_from([None, INF, -INF, NAN]),
)
def test_as_torch_has_it(num_rows: int, size: int, seed: int, levels: int, special: float | None) -> None:
    assert_same(make_rows(num_rows, size, seed, levels=levels, special=special))


@pytest.mark.parametrize("fill", [0.0, -0.0, INF, -INF, NAN, 1e-45, -3.4e38])
@pytest.mark.parametrize("size", [1, 15, 16, 1024, 1025, 49_152])
def test_rows_of_one_value_have_their_first(fill: float, size: int) -> None:
    assert_same(torch.full((2, size), fill))


@pytest.mark.parametrize("place", [0, 1023, 1024, 30_000, 49_151])
@pytest.mark.parametrize("value", [9.0, INF, NAN])
def test_found_wherever_it_stands(place: int, value: float) -> None:
    rows = torch.randn(3, 49_152)
    rows[1, place] = value
    assert_same(rows)
    rows[1, 49_151] = value  # and another one at the end
    assert_same(rows)


def test_several_threads_share_a_row_and_one_takes_few(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []
    real: Callable[..., None] = cpu_argmax._find_largest

    def count(num_threads: int, *arguments: int) -> None:
        shared.append(num_threads)
        real(num_threads, *arguments)

    monkeypatch.setattr(cpu_argmax, "_find_largest", count)
    assert_same(torch.randn(1, 49_152))
    assert shared == [2]
    assert_same(torch.randn(2, 8_000))
    assert shared == [2, 1]


def test_other_tensors_take_torchs_way() -> None:
    rows = torch.randn(6, 40)
    for other in (rows.double(), rows.t(), rows.half()):
        peaks, places = largest(other)
        expected = other.max(dim=-1)
        assert torch.equal(peaks, expected.values)
        assert torch.equal(places, expected.indices)
