"""Draws and cuts of the compiled operators, compared with their definitions: exactly equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.kernels import noise, selection
from pagemill.kernels.cpu.sampling import noise as cpu_noise
from pagemill.kernels.cpu.sampling import selection as cpu_selection


def make_logits(num_rows: int, size: int, spread: float, seed: int, *, levels: int = 0) -> torch.Tensor:
    """Rows with maximum 0, in a non-contiguous tensor; `levels`: the number of different values."""
    torch.manual_seed(seed)
    logits = torch.randn(num_rows, size + 3)[:, :size]
    if levels:
        logits = (logits * levels / 4).round() * 4 / levels
    logits = logits * spread
    wide = torch.zeros(num_rows, size + 5)
    wide[:, :size] = logits - logits.amax(dim=1, keepdim=True)
    return wide[:, :size]


def bar(logits: torch.Tensor, share: float) -> None:
    """Set about this share of every row, except the largest value, to minus infinity."""
    logits[(torch.rand(logits.shape) < share) & (logits < 0.0)] = -torch.inf


def keys_of(num_rows: int, seed: int) -> torch.Tensor:
    rows = torch.arange(num_rows)
    return noise.noise_keys(rows + seed, torch.zeros_like(rows), rows)


spreads = st.sampled_from([0.0, 1e-3, 0.1, 1.0, 3.0, 10.0, 1e3, 1e30])
cases = {
    "num_rows": st.integers(1, 40),
    "size": st.one_of(st.integers(1, 70), st.integers(71, 3000)),
    "spread": spreads,
    "seed": st.integers(0, 2**31),
    "levels": st.sampled_from([0, 2, 40]),
    "barred": st.sampled_from([0.0, 0.5, 0.999]),
}


@settings(max_examples=100, deadline=None)
@given(**cases)
def test_a_draw_is_the_definitions(num_rows, size, spread, seed, levels, barred):
    logits, keys = make_logits(num_rows, size, spread, seed, levels=levels), keys_of(num_rows, seed)
    bar(logits, barred)
    assert torch.equal(cpu_noise.argmax_with_noise(logits, keys), noise.argmax_of_sums(logits, keys))


def test_draws_from_a_real_vocabulary_are_the_definitions():
    for seed, spread in enumerate((0.5, 1.0, 3.0, 6.0)):
        logits, keys = make_logits(48, 49_152, spread, seed), keys_of(48, seed)
        assert torch.equal(cpu_noise.argmax_with_noise(logits, keys), noise.argmax_of_sums(logits, keys))


def test_equal_sums_go_to_the_lowest_token(monkeypatch):
    """With the same noise for all tokens, equal logits have equal sums."""
    monkeypatch.setattr(cpu_noise, "gumbel_noise", lambda keys, ids: torch.zeros(ids.shape))
    logits = torch.zeros(5, 40)
    chosen = cpu_noise.argmax_with_noise(logits, keys_of(5, 0))
    ids, counts = cpu_noise.candidates(logits, keys_of(5, 0))
    assert chosen.tolist() == [min(ids[row, : counts[row]].tolist()) for row in range(5)]


def test_more_candidates_than_room_are_drawn_the_long_way():
    """Happens only if no logit is 0: then the scores cannot exclude any token."""
    logits, keys = torch.full((3, 5000), -200.0), keys_of(3, 7)
    counts = cpu_noise.candidates(logits, keys)[1]
    assert (counts > cpu_noise.MOST_CANDIDATES).all()
    assert torch.equal(cpu_noise.argmax_with_noise(logits, keys), noise.argmax_of_sums(logits, keys))


def test_few_tokens_need_their_noise():
    counts = cpu_noise.candidates(make_logits(64, 49_152, 3.0, 1), keys_of(64, 1))[1]
    assert counts.min() >= 1
    assert counts.float().mean() < 60


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_gets_a_token_and_touches_no_other(bad):
    logits, keys = make_logits(3, 500, 3.0, 1), keys_of(3, 1)
    clean = cpu_noise.argmax_with_noise(logits, keys)
    logits[1] = torch.nan if bad != bad else -torch.inf
    logits[1, 7] = bad
    drawn = cpu_noise.argmax_with_noise(logits, keys)
    assert drawn[[0, 2]].tolist() == clean[[0, 2]].tolist()
    assert 0 <= drawn[1] < 500
    counts, mass = torch.full((3,), 5), torch.full((3,), 0.9, dtype=torch.float64)
    for cut in (
        lambda x: cpu_selection.kth_largest(x, counts),
        lambda x: cpu_selection.top_p_thresholds(x, x.softmax(dim=-1), mass),
    ):
        assert torch.equal(cut(logits)[[0, 2]], cut(logits[[0, 2, 2]])[[0, 1]])


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(**cases, data=st.data())
def test_the_kth_largest_is_the_sorts(num_rows, size, spread, seed, levels, barred, data):
    logits = make_logits(num_rows, size, spread, seed, levels=levels) + data.draw(st.sampled_from([0, 5, -7]))
    bar(logits, barred)
    counts = torch.tensor(data.draw(st.lists(st.integers(1, size), min_size=num_rows, max_size=num_rows)))
    assert torch.equal(cpu_selection.kth_largest(logits, counts), selection.kth_of_best(logits, counts))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(**cases, data=st.data())
def test_the_top_p_cut_is_the_sorts(num_rows, size, spread, seed, levels, barred, data):
    logits = make_logits(num_rows, size, spread, seed, levels=levels)
    bar(logits, barred)
    shares = st.one_of(st.floats(1e-9, 1.0, exclude_max=True), st.sampled_from([0.5, 0.9, 0.999, 0.9999999]))
    mass = torch.tensor(
        data.draw(st.lists(shares, min_size=num_rows, max_size=num_rows)), dtype=torch.float64
    )
    probabilities = logits.softmax(dim=-1)
    expected = selection.top_p_of_best(logits, probabilities, mass)
    assert torch.equal(cpu_selection.top_p_thresholds(logits, probabilities, mass), expected)


def test_cuts_of_a_real_vocabulary_are_the_sorts():
    for spread in (0.01, 1.0, 3.0):
        logits = make_logits(16, 49_152, spread, 3)
        counts = torch.tensor([1, 2, 50, 51, 1000, 5000, 49_151, 49_152] * 2)
        assert torch.equal(cpu_selection.kth_largest(logits, counts), selection.kth_of_best(logits, counts))
        mass = torch.linspace(0.05, 0.999, 16, dtype=torch.float64)
        probabilities = logits.softmax(dim=-1)
        expected = selection.top_p_of_best(logits, probabilities, mass)
        assert torch.equal(cpu_selection.top_p_thresholds(logits, probabilities, mass), expected)
