"""Sampling without a sort, run by Triton's interpreter, against sorted references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.engine.execution.sampling.filters import filter_logits
from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels import dispatch, reference
from pagemill.kernels.gpu import sampling, tuning
from pagemill.kernels.noise import gumbel_noise, noise_keys
from pagemill.kernels.types.sampling_rows import SamplingRows
from tests.engine.execution.sampling.extreme_cases import CASES, Case, check

_ROWS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.3, "top_k": 40},
    {"temperature": 0.01, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.999, "top_k": 700},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.5, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2.0, "top_k": 10**6},
]


def _rows(params: list[SamplingParams], positions: torch.Tensor) -> SamplingRows:
    return SamplingRows(
        torch.tensor([p.temperature for p in params]),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params]).log(),
        torch.arange(len(params)) * 0x123456789AB + 5,
        torch.arange(len(params)) % 3,
        positions,
    )


def _sorted_draw(logits: torch.Tensor, params: list[SamplingParams], rows: SamplingRows) -> torch.Tensor:
    """The engine's computation on a CPU."""
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / rows.temperatures[:, None]
    filter_logits(scaled, params)
    keys = noise_keys(rows.seeds, rows.sample_indices, rows.positions)
    noise = gumbel_noise(keys, torch.arange(logits.shape[1], dtype=torch.int32))
    return (scaled + noise).argmax(dim=-1)


@pytest.mark.parametrize("vocab_size", [61, 1200])
def test_draws_what_a_sort_draws(vocab_size: int) -> None:
    params = [SamplingParams(**options) for options in _ROWS]
    for position in range(2):
        logits = 3 * torch.randn(len(params), vocab_size)
        logits[:, 5] = logits[:, 9]  # a tie
        logits[3, 7:] = -torch.inf
        rows = _rows(params, torch.full((len(params),), position))
        with dispatch.override("triton"):
            out = dispatch.sample_tokens(logits, logits.amax(dim=-1), rows, has_filters=True)
        expected = _sorted_draw(logits, params, rows)
        assert out.tolist() == expected.tolist()
        twin = reference.sample_tokens(logits, logits.amax(dim=-1), rows, has_filters=True)
        assert twin.tolist() == expected.tolist()


@pytest.mark.parametrize("top", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.9}], ids=str)
def test_ties_with_the_last_token_kept_are_kept(top: dict[str, float]) -> None:
    """Five tokens with one logit and many far below: any filter keeps all five, regardless of its number."""
    logits = torch.full((12, 300), -4.0)
    logits[:, [1, 50, 101, 102, 299]] = 2.0
    params = [SamplingParams(temperature=1.0, **top)] * 12  # type: ignore[arg-type]
    rows = _rows(params, torch.arange(12))
    with dispatch.override("triton"):
        out = dispatch.sample_tokens(logits, logits.amax(dim=-1), rows, has_filters=True)
    keys = noise_keys(rows.seeds, rows.sample_indices, rows.positions)
    noise = gumbel_noise(keys, torch.arange(300, dtype=torch.int32))
    tied = torch.tensor([1, 50, 101, 102, 299])
    assert torch.equal(out, tied[noise[:, tied].argmax(dim=-1)])
    assert len(set(out.tolist())) > 1


def test_noise_is_the_same_as_on_the_cpu() -> None:
    """With equal logits only the noise decides: 48 rows, 97 tokens."""
    logits = torch.zeros(48, 97)
    rows = _rows([SamplingParams(temperature=1.0)] * 48, torch.arange(48) * 7919)
    with dispatch.override("triton"):
        out = dispatch.sample_tokens(logits, logits.amax(dim=-1), rows, has_filters=False)
    keys = noise_keys(rows.seeds, rows.sample_indices, rows.positions)
    noise = gumbel_noise(keys, torch.arange(97, dtype=torch.int32))
    assert torch.equal(out, noise.argmax(dim=-1))


def test_a_row_of_nan_gives_some_token_and_leaves_others_alone() -> None:
    logits = torch.randn(3, 100)
    logits[1] = torch.nan
    params = [SamplingParams(temperature=1.0, top_p=0.9)] * 3
    rows = _rows(params, torch.zeros(3, dtype=torch.int64))
    with dispatch.override("triton"):
        out = dispatch.sample_tokens(logits, logits.amax(dim=-1), rows, has_filters=True)
    assert 0 <= int(out[1]) < 100
    expected = _sorted_draw(logits[[0, 2]], params[:2], SamplingRows(*(field[[0, 2]] for field in rows)))
    assert out[[0, 2]].tolist() == expected.tolist()


def _bits_of_the_cut(row: torch.Tensor, params: SamplingParams) -> int:
    """With a sort: the largest distance that top-k and top-p keep, as an integer."""
    distances = ((row.amax() - row) / params.temperature).sort().values
    if 0 < params.top_k < len(row):
        distances = distances[distances <= distances[params.top_k - 1]]
    if params.top_p < 1.0:
        reached = (-distances).exp().double().cumsum(0)
        distances = distances[: int((reached < params.top_p * reached[-1]).sum()) + 1]
    elif not 0 < params.top_k < len(row):
        distances = torch.tensor([torch.inf])
    return int(distances[-1].view(torch.int32))


def _misleading() -> torch.Tensor:
    """Logits at the edges of two bins, so that the middles of the bins result in another cut for 0.69 of the weight."""
    row = torch.full((9000,), -40.0)
    row[0] = 0.0
    row[1:3001] = -51 / 12 + 1e-5
    row[3001:6001] = -5.0
    return row


_WIDE = 9000
_CUT_ROWS: dict[str, tuple[torch.Tensor, dict[str, float], bool]] = {
    "top-p": (3 * torch.randn(_WIDE), {"top_p": 0.9}, True),
    "top-k": (3 * torch.randn(_WIDE), {"top_k": 50}, True),
    "both": (3 * torch.randn(_WIDE), {"top_k": 50, "top_p": 0.95, "temperature": 0.6}, True),
    "large k": (3 * torch.randn(_WIDE), {"top_k": 4800}, True),
    "large k, top-p": (3 * torch.randn(_WIDE), {"top_k": 4800, "top_p": 0.99}, False),
    "hot": (3 * torch.randn(_WIDE), {"top_p": 0.6, "temperature": 5.0}, True),
    "peaked": (torch.eye(_WIDE)[7] * 30, {"top_p": 0.999}, True),
    "one": (3 * torch.randn(_WIDE), {"top_p": 1e-9}, True),
    "ties": (torch.zeros(_WIDE), {"top_p": 0.5}, False),
    "far ties": (torch.eye(_WIDE)[7] * 60, {"top_k": 2}, False),
    "nearly all": (8 * torch.randn(_WIDE), {"top_p": 1 - 1e-6}, False),
    "impossible tokens": (torch.randn(_WIDE).masked_fill(torch.arange(_WIDE) > 90, -torch.inf), {"top_p": 0.8}, True),
    "misleading": (_misleading(), {"top_p": 0.69}, True),
    "none": (torch.randn(_WIDE), {}, True),
}  # fmt: skip


@pytest.mark.parametrize("num_multiprocessors", [1, 32], ids=["one split", "three splits"])
def test_cuts_are_those_of_a_sort(num_multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a band in a row, and for any number of programs that share it."""
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: num_multiprocessors)
    logits = torch.stack([row for row, _, _ in _CUT_ROWS.values()])
    params = [SamplingParams(**({"temperature": 1.0} | options)) for _, options, _ in _CUT_ROWS.values()]
    rows = _rows(params, torch.zeros(len(params), dtype=torch.int64))
    _, sizes, _ = sampling._bands(logits, logits.amax(dim=-1), rows)
    for name, in_band, (_, options, has_band) in zip(
        _CUT_ROWS, sizes[:, 1].tolist(), _CUT_ROWS.values(), strict=True
    ):
        assert not options or (in_band >= 0) == has_band, name
    cuts = sampling._cuts(logits, logits.amax(dim=-1), rows).tolist()
    expected = [_bits_of_the_cut(row, each) for row, each in zip(logits, params, strict=True)]
    assert dict(zip(_CUT_ROWS, cuts, strict=True)) == dict(zip(_CUT_ROWS, expected, strict=True))


# numpy warns about infinity minus infinity; a device does not.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
@settings(max_examples=60)
@given(st.lists(CASES, min_size=1, max_size=4))
def test_extreme_values_give_allowed_tokens_or_are_told(cases: list[Case]) -> None:
    with dispatch.override("triton"):
        check(cases, draws_on_device=True)
