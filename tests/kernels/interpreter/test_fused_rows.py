"""The fused Triton kernels, run by Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import dispatch, reference
from pagemill.kernels.types.layer_cache import FP8, LayerCache, allocate_layer, as_bytes
from pagemill.kernels.types.rotation import Rotation

_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", list(_TOLERANCE), ids=lambda dtype: str(dtype)[6:])


def _close(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(left.float(), right.float(), rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("size", [64, 576, 1000])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    wide = torch.randn(5, 2 * size).to(dtype)
    x, weight = wide[:, :size], torch.randn(size).to(dtype)
    with dispatch.override("triton"):
        out = dispatch.rms_norm(x, weight, 1e-5)
        assert len(dispatch.rms_norm(x[:0], weight, 1e-5)) == 0
    assert out.is_contiguous()
    _close(out, reference.rms_norm(x.double(), weight, 1e-5), dtype)


@DTYPES
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(3, 200).to(dtype),
        torch.randn(3, 400).to(dtype)[:, 7:207],
        torch.ones(200),
    )
    with dispatch.override("triton"):
        normed, total = dispatch.add_rms_norm(x, residual, weight.to(dtype), 1e-5)
    assert torch.equal(total, x + residual)
    _close(normed, reference.rms_norm(total.double(), weight, 1e-5), dtype)


@DTYPES
@pytest.mark.parametrize("size", [48, 3000])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * torch.randn(3, 2 * size).to(dtype)
    gate_up[0, 0] = -500.0
    with dispatch.override("triton"):
        out = dispatch.silu_and_mul(gate_up)
    _close(out / 16, reference.silu_and_mul(gate_up.double()) / 16, dtype)


def _heads(num_tokens: int, dtype: torch.dtype, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Five query heads, two key heads and two value heads of one projection."""
    qkv = torch.randn(num_tokens, 9, head_dim).to(dtype)
    return qkv.split([5, 2, 2], dim=1)


def _rotation(num_tokens: int, rotary_dim: int, head_dim: int, dtype: torch.dtype, *, norm: bool) -> Rotation:
    half = torch.rand(num_tokens, rotary_dim // 2) * 6.3
    angles = torch.cat([half, half], dim=1)
    weights = [torch.randn(head_dim).to(dtype) if norm else None for _ in range(2)]
    if not rotary_dim:
        return Rotation(None, None, *weights, 1e-6)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), *weights, 1e-6)


@DTYPES
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 0), (128, 128)])
def test_rotary_and_cache(head_dim: int, rotary_dim: int, norm: bool, dtype: torch.dtype) -> None:
    num_tokens = 11
    query, key, value = _heads(num_tokens, dtype, head_dim)
    rotation = _rotation(num_tokens, rotary_dim, head_dim, dtype, norm=norm)
    slots = torch.randperm(3 * 8)[:num_tokens]
    slots[[2, 10]] = -1
    out, expected = (
        LayerCache(*(torch.full((3, 2, 8, head_dim), 7.0, dtype=dtype) for _ in range(2))) for _ in "ab"
    )
    with dispatch.override("triton"):
        turned = dispatch.rotary_and_cache(query, key, value, rotation, out, slots)
    truth = reference.rotary_and_cache(query, key, value, rotation, expected, slots)
    _close(turned, truth, dtype)
    _close(out.keys, expected.keys, dtype)
    assert torch.equal(out.values, expected.values)


@pytest.mark.parametrize("cache_dtype", [torch.int8, FP8])
def test_rotary_and_scaled_cache(cache_dtype: torch.dtype) -> None:
    """A scale per token and head, from the rotated key; a quotient may round differently, by one step."""
    query, key, value = _heads(9, torch.float32, 64)
    rotation = _rotation(9, 64, 64, torch.float32, norm=True)
    slots = torch.randperm(2 * 16)[:9]
    out, expected = (allocate_layer(2, 2, 16, 64, cache_dtype) for _ in range(2))
    with dispatch.override("triton"):
        dispatch.rotary_and_cache(query, key, value, rotation, out, slots)
    reference.rotary_and_cache(query, key, value, rotation, expected, slots)
    for ours, theirs in zip(out.tensors(), expected.tensors(), strict=True):
        if ours.dtype is torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=0.0)
        else:
            steps = (as_bytes(ours).to(torch.int16) - as_bytes(theirs).to(torch.int16)).abs()
            assert steps.max() <= 1
            assert steps.float().mean() < 2e-3


def test_only_padding_writes_nothing() -> None:
    query, key, value = _heads(3, torch.float32, 64)
    cache = LayerCache(torch.full((1, 2, 8, 64), torch.nan), torch.full((1, 2, 8, 64), torch.nan))
    with dispatch.override("triton"):
        dispatch.rotary_and_cache(query, key, value, Rotation(), cache, torch.full((3,), -1))
    assert cache.keys.isnan().all()
    assert cache.values.isnan().all()
