"""The CPU version's fused row operators compared with the same formulas in fp64."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels.cpu import fused_rows

SHAPES = [(1, 576), (8, 64), (128, 576), (3, 24), (5, 16), (2, 7), (64, 1536)]
EPS = 1e-5


pytestmark = pytest.mark.usefixtures("two_threads")


def strided(num_rows: int, size: int) -> torch.Tensor:
    """A view between two columns of NaN, which an access out of bounds would copy or overwrite."""
    base = torch.full((num_rows, size + 2), torch.nan)
    base[:, 1:-1] = torch.randn(num_rows, size)
    return base[:, 1:-1]


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_tokens", "size"), SHAPES)
def test_rms_norm(num_tokens, size):
    torch.manual_seed(42)
    x, weight = strided(num_tokens, size), torch.randn(size)
    expected = norm(x, weight)
    assert_exact(fused_rows.rms_norm(x, weight, EPS), expected)
    assert fused_rows.rms_norm(x, weight, EPS, out=x) is x
    assert_exact(x, expected)
    assert x._base is not None
    assert x._base[:, [0, -1]].isnan().all()


@pytest.mark.parametrize(("num_tokens", "size"), SHAPES)
def test_add_rms_norm(num_tokens, size):
    torch.manual_seed(42)
    x, residual, weight = strided(num_tokens, size), strided(num_tokens, size), torch.randn(size)
    normed, total = fused_rows.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_exact(normed, norm(total, weight))


@pytest.mark.parametrize(("num_tokens", "size"), SHAPES)
def test_silu_and_mul(num_tokens, size):
    torch.manual_seed(42)
    gate_up = strided(num_tokens, 2 * size)
    gate_up[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gate, up = gate_up.double().split(size, dim=1)
    assert_exact(fused_rows.silu_and_mul(gate_up), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("rotary_dim", [64, 32, 20])
@pytest.mark.parametrize("num_tokens", [1, 5, 128])
def test_rotary_embedding(num_tokens, rotary_dim):
    torch.manual_seed(42)
    packed = torch.randn(num_tokens, 9 + 3 + 3, 64)
    before = packed.double()
    query, key, _ = packed.split([9, 3, 3], dim=1)
    angles = torch.rand(num_tokens, rotary_dim // 2).repeat(1, 2) * 6
    fused_rows.rotary_embedding(query, key, angles.cos(), angles.sin())

    expected = before.clone()
    x = before[:, :12, :rotary_dim]
    low, high = x.chunk(2, dim=-1)
    cos, sin = angles.cos().double()[:, None], angles.sin().double()[:, None]
    expected[:, :12, :rotary_dim] = x * cos + torch.cat([-high, low], dim=-1) * sin
    assert_exact(packed, expected)


def test_a_row_does_not_depend_on_the_others():
    torch.manual_seed(42)
    x, weight = torch.randn(128, 576), torch.randn(576)
    assert torch.equal(fused_rows.rms_norm(x, weight, EPS)[77:78], fused_rows.rms_norm(x[77:78], weight, EPS))
    assert torch.equal(fused_rows.silu_and_mul(x)[77:78], fused_rows.silu_and_mul(x[77:78]))
