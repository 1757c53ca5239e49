"""Rows of 8-bit values in Triton's interpreter: bits equal to the definition, and matmuls compared with exact sums."""

from __future__ import annotations

import pytest
import torch

from pagemill.kernels import dispatch, row_scaled
from pagemill.kernels.gpu import scaled_matmul
from pagemill.kernels.types.layer_cache import FP8
from pagemill.kernels.types.scaled_rows import ScaledRows

KINDS = pytest.mark.parametrize("numbers", [torch.int8, FP8], ids=["int8", "fp8"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def rows_of_every_size(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes, one of zeros, one with the dtype's largest value, and with infinity and NaN."""
    torch.manual_seed(3)
    x = torch.randn(num_rows, size) * torch.logspace(-6, 4, num_rows)[:, None]
    x[1] = 0.0
    x = x.to(dtype)
    x[2, size // 2] = torch.finfo(dtype).max
    x[3, 0] = float("inf")
    x[4, size - 1] = float("nan")
    x[5] = torch.finfo(dtype).tiny
    return x


def assert_same(ours: ScaledRows, expected: ScaledRows) -> None:
    assert torch.equal(ours.numbers.float(), expected.numbers.float())
    torch.testing.assert_close(ours.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    assert ours.dtype is expected.dtype


@KINDS
@DTYPES
@pytest.mark.parametrize("size", [8, 100, 9000])
def test_rows_are_quantized_as_defined(size: int, dtype: torch.dtype, numbers: torch.dtype) -> None:
    """Bit for bit: non-finite values affect only their row, and a row can consist of several pieces."""
    x = rows_of_every_size(9, size, dtype)
    with dispatch.override("triton"):
        ours = dispatch.quantize_rows(x, numbers)
        assert len(dispatch.quantize_rows(x[:0], numbers)) == 0
        assert_same(dispatch.quantize_rows(torch.cat([x, x], 1)[:, :size], numbers), ours)
    assert_same(ours, row_scaled.quantize_rows(x, numbers))
    assert ours.scales[3:5].isnan().all()
    assert not ours.numbers[3:5].float().any()
    finite = [0, 1, 2, 5, 6, 7, 8]
    step = ours.scales[finite, None].double() * (
        0.5 if numbers is torch.int8 else 16.0
    )  # half of the widest step
    error = ours.numbers[finite].double() * ours.scales[finite, None].double() - x[finite].double()
    assert (error.abs() <= step * 1.001).all()


@KINDS
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("adds", [True, False])
def test_norms_and_activations_are_quantized_on_their_way(
    adds: bool, keeps: bool, numbers: torch.dtype
) -> None:
    """The bits of the separate operators."""
    torch.manual_seed(4)
    x, residual = torch.randn(5, 200).half(), torch.randn(5, 200).half() if adds else None
    x[3, 5] = float("nan")
    weight, gate_up = torch.rand(200).half(), 3 * torch.randn(5, 2 * 136).half()
    with dispatch.override("triton"):
        rows, total = dispatch.norm_and_quantize(x, residual, weight, 1e-5, numbers, keeps)
        gated = dispatch.silu_and_quantize(gate_up, numbers, keeps)
        if residual is None:
            normed = dispatch.rms_norm(x, weight, 1e-5)
            assert total is x
        else:
            normed, expected_total = dispatch.add_rms_norm(x, residual, weight, 1e-5)
            torch.testing.assert_close(total, expected_total, rtol=0, atol=0, equal_nan=True)
        activated = dispatch.silu_and_mul(gate_up)
        assert_same(rows, dispatch.quantize_rows(normed, numbers))
        assert_same(gated, dispatch.quantize_rows(activated, numbers))
    if keeps:
        assert rows.kept is not None
        assert gated.kept is not None
        torch.testing.assert_close(rows.kept, normed, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(gated.kept, activated)
    else:
        assert rows.kept is None
        assert gated.kept is None
    by_torch, _ = row_scaled.norm_and_quantize(x, residual, weight, 1e-5, numbers, keeps)
    real = [0, 1, 2, 4]
    torch.testing.assert_close(rows.scales[real], by_torch.scales[real], rtol=2e-3, atol=0)


@DTYPES
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 40, 128), (17, 50, 83), (33, 257, 300), (70, 130, 256)], ids=str)
def test_integer_products_are_exact(shape: tuple[int, int, int], has_bias: bool, dtype: torch.dtype) -> None:
    """Bit for bit, including scales, bias and rounding; but the interpreter truncates to bfloat16."""
    num_rows, out_features, in_features = shape
    torch.manual_seed(5)
    rows = row_scaled.quantize_rows((3 * torch.randn(num_rows, in_features)).to(dtype), torch.int8)
    weight = row_scaled.quantize_rows(torch.randn(out_features, in_features), torch.int8)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    with dispatch.override("triton"):
        out = dispatch.scaled_matmul(rows, weight, bias)
    assert out.dtype is dtype
    if dtype is torch.bfloat16:
        torch.testing.assert_close(out, row_scaled.scaled_matmul(rows, weight, bias), rtol=2**-7, atol=0)
        return
    assert torch.equal(out, row_scaled.scaled_matmul(rows, weight, bias))
    integers = rows.numbers.long() @ weight.numbers.long().t()
    expected = integers.float() * weight.scales * rows.scales[:, None]
    assert torch.equal(out, (expected if bias is None else expected + bias.float()).to(dtype))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 40, 128), (17, 50, 83), (70, 130, 256)], ids=str)
def test_float8_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Against fp64, within the rounding of a chain of fp32 additions and of the result."""
    num_rows, out_features, in_features = shape
    torch.manual_seed(6)
    rows = row_scaled.quantize_rows(torch.randn(num_rows, in_features).to(dtype), FP8)
    weight = row_scaled.quantize_rows(torch.randn(out_features, in_features), FP8)
    bias = torch.randn(out_features).to(dtype)
    with dispatch.override("triton"):
        out = dispatch.scaled_matmul(rows, weight, bias)
    left = rows.numbers.double() * rows.scales.double()[:, None]
    right = weight.numbers.double() * weight.scales.double()[:, None]
    truth = left @ right.t() + bias.double()
    sizes = left.abs() @ right.abs().t() + bias.double().abs()
    bound = sizes * (in_features + 3) * 2.0**-24 + truth.abs() * torch.finfo(dtype).eps
    assert ((out.double() - truth).abs() <= bound).all()


def test_a_row_that_is_not_finite_stays_so_alone() -> None:
    weight = row_scaled.quantize_rows(torch.randn(40, 64), torch.int8)
    x = torch.randn(3, 64).half()
    x[1, 7] = float("nan")
    with dispatch.override("triton"):
        out = dispatch.scaled_matmul(dispatch.quantize_rows(x, torch.int8), weight, None)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_the_library_gives_the_same(num_rows: int) -> None:
    """`torch._scaled_mm`, which also exists on CPUs, up to the rounding of bfloat16."""
    torch.manual_seed(7)
    rows = row_scaled.quantize_rows(torch.randn(num_rows, 128).bfloat16(), FP8)
    weight, bias = row_scaled.quantize_rows(torch.randn(96, 128), FP8), torch.randn(96).bfloat16()
    assert scaled_matmul.library_takes(rows, weight)
    by_library = scaled_matmul.library_matmul(rows, weight, bias)
    torch.testing.assert_close(by_library, scaled_matmul.own_matmul(rows, weight, bias), rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("numbers", "shape", "dtype"),
    [
        (torch.int8, (32, 64), torch.bfloat16),
        (FP8, (40, 64), torch.bfloat16),
        (FP8, (32, 72), torch.bfloat16),
        (FP8, (32, 64), torch.float16),
    ],
    ids=str,
)
def test_what_the_library_does_not_take(
    numbers: torch.dtype, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = row_scaled.quantize_rows(torch.randn(shape), numbers)
    rows = row_scaled.quantize_rows(torch.randn(2, shape[1]).to(dtype), numbers)
    assert not scaled_matmul.library_takes(rows, weight)
