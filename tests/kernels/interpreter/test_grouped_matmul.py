"""Matmuls with low-bit weights, run by Triton's interpreter, compared with the represented values."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import dispatch, reference
from pagemill.kernels.gpu.grouped_matmul import widened
from pagemill.kernels.gpu.tuning import MOST_UNWIDENED_ROWS
from pagemill.kernels.types.grouped_weight import GroupedWeight
from pagemill.kernels.types.tiled_weight import TiledWeight

_TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def random_weight(kind: str, out_features: int, in_features: int, group_size: int) -> GroupedWeight:
    """`kind`: nibbles or bytes, with zero points or not, or floats."""
    num_groups = in_features // group_size
    scales = 0.1 * torch.rand(out_features, num_groups) + 0.01
    zeros = None
    if kind.endswith("zeros"):
        zeros = torch.randint(0, 17, (out_features, num_groups), dtype=torch.int16)
    if kind.startswith("nibbles"):
        codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
        return GroupedWeight(codes, scales, zeros, bits=4)
    if kind.startswith("bytes"):
        dtype = torch.int8 if zeros is None else torch.uint8
        codes = torch.randint(0, 256, (out_features, in_features), dtype=torch.uint8).view(dtype)
        return GroupedWeight(codes, scales / 16, zeros)
    codes = torch.randint(0, 0x7F, (out_features, in_features), dtype=torch.uint8)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8) << 7
    return GroupedWeight(codes.view(torch.float8_e4m3fn), scales / 64)


@pytest.mark.parametrize("dtype", list(_TOLERANCE), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("kind", ["nibbles", "nibbles zeros", "bytes", "bytes zeros", "floats"])
@pytest.mark.parametrize(
    ("shape", "group_size"), [((40, 128), 32), ((64, 256), 128), ((33, 192), 192)], ids=str
)
def test_product(dtype: torch.dtype, kind: str, shape: tuple[int, int], group_size: int) -> None:
    weight = random_weight(kind, *shape, group_size)
    tiled = TiledWeight.from_weight(weight)
    assert tiled is not None
    assert torch.equal(tiled.numbers(), weight.dequantize())
    wide = torch.randn(3, 2 * shape[1]).to(dtype)
    x = wide[:, : shape[1]]
    with dispatch.override("triton"):
        out = dispatch.grouped_matmul(x, tiled)
        assert len(dispatch.grouped_matmul(x[:0], tiled)) == 0
    assert out.dtype is dtype
    assert out.is_contiguous()
    expected = x.double() @ weight.dequantize().double().t()
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double() / scale, expected / scale, rtol=0, atol=_TOLERANCE[dtype])
    torch.testing.assert_close(reference.grouped_matmul(x.double(), tiled), expected)


@pytest.mark.parametrize("kind", ["nibbles", "nibbles zeros", "bytes", "bytes zeros", "floats"])
@pytest.mark.parametrize(("shape", "group_size"), [((40, 128), 32), ((3, 192), 192)], ids=str)
def test_many_rows(kind: str, shape: tuple[int, int], group_size: int) -> None:
    """The weight is dequantized to the dtype of the rows."""
    tiled = TiledWeight.from_weight(random_weight(kind, *shape, group_size))
    assert tiled is not None
    rounded = tiled.numbers().half()
    assert torch.equal(widened(tiled, torch.float16), rounded)
    x = torch.randn(MOST_UNWIDENED_ROWS + 1, 2 * shape[1]).half()[:, : shape[1]]
    with dispatch.override("triton"):
        out = dispatch.grouped_matmul(x, tiled)
        float_out = dispatch.grouped_matmul(x.float(), tiled)
    expected = x.double() @ rounded.double().t()
    scale = float(expected.abs().max())
    torch.testing.assert_close(out.double() / scale, expected / scale, rtol=0, atol=_TOLERANCE[torch.float16])
    expected = x.double() @ tiled.numbers().double().t()
    torch.testing.assert_close(
        float_out.double() / scale, expected / scale, rtol=0, atol=_TOLERANCE[torch.float32]
    )


@pytest.mark.parametrize("num_rows", [1, 17, 33, 70])
def test_numbers_of_rows(num_rows: int) -> None:
    weight = random_weight("nibbles zeros", 70, 64, 32)
    tiled = TiledWeight.from_weight(weight)
    assert tiled is not None
    x = torch.randn(num_rows, 64).half()
    with dispatch.override("triton"):
        out = dispatch.grouped_matmul(x, tiled)
    expected = x.double() @ weight.dequantize().double().t()
    torch.testing.assert_close(out.double() / 8, expected / 8, rtol=2e-3, atol=2e-3)


def test_groups_that_the_kernel_lacks() -> None:
    assert TiledWeight.from_weight(random_weight("nibbles", 8, 48, 16)) is None
    assert TiledWeight.from_weight(random_weight("nibbles", 8, 80, 80)) is None
