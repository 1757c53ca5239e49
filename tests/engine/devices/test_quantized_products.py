"""The matmuls that a GPU computes with a quantized checkpoint's weights, computed on the CPU."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.devices.quantized_products import (
    GroupedProduct,
    ScaledProduct,
    cuda_product,
    rounded_product,
)
from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.experts.matrices import ExpertMatrices
from pagemill.engine.layers.experts.products import StackedProduct, TorchGroupedProduct
from pagemill.engine.layers.linear import DenseProduct, LinearOptions
from pagemill.engine.layers.quantized_weight import QuantizedWeight, Weight, joined
from pagemill.engine.models.quantized.reader import join_parts
from pagemill.engine.models.quantized.registry import find_scheme
from pagemill.kernels import row_scaled
from tests.engine.models.quantized.checkpoints import FORMATS, Format

CPU = torch.device("cpu")


def stored(
    form: Format, *sizes: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Weight], torch.Tensor]:
    """Return weights of these outputs and 128 inputs, and the values of all."""
    torch.manual_seed(2)
    scheme = find_scheme(form.config)
    assert scheme is not None
    weights, numbers = [], []
    for size in sizes:
        made = form.store(0.3 * torch.randn(size, 128))
        tensors = {f"m.{part}": tensor for part, tensor in made.parts.items() if part != "bias"}
        weights.append(join_parts(tensors, scheme, dtype)["m.weight"])
        numbers.append(made.weight)
    return weights, torch.cat(numbers)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str) -> None:
    weights, numbers = stored(FORMATS[name][0], 64, 32)
    bias, rows = torch.randn(96), torch.randn(5, 128)
    product = cuda_product(weights, bias, CPU, has_float8=False)
    assert isinstance(product, DenseProduct if name == "nvfp4" else GroupedProduct)
    torch.testing.assert_close(product(rows), rows @ numbers.t() + bias)


@pytest.mark.parametrize("name", ["fp8-rows", "fp8-tensor"])
def test_float8_rows(name: str) -> None:
    """Only rows are rounded to e4m3, each with a separate scale."""
    weights, numbers = stored(FORMATS[name][0], 64, 32, dtype=torch.bfloat16)
    bias = torch.randn(96).bfloat16()
    rows = (torch.randn(5, 128) * torch.tensor([1e-3, 1.0, 30.0, 1e4, 0.0])[:, None]).bfloat16()
    product = cuda_product(weights, bias, CPU, has_float8=True)
    assert isinstance(product, ScaledProduct)
    assert product.kept_as is not None
    scaled = row_scaled.quantize_rows(rows, torch.float8_e4m3fn)
    expected = (
        scaled.numbers.double() * scaled.scales.double()[:, None] @ numbers.double().t() + bias.double()
    )
    torch.testing.assert_close(product(rows).double(), expected, rtol=5e-3, atol=1e-5)
    assert torch.equal(product(scaled), product(rows)), "rows that were rounded before"


@pytest.mark.parametrize("numbers", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(80, 96), (83, 257)])
def test_weights_are_rounded(
    in_features: int, out_features: int, dtype: torch.dtype, numbers: torch.dtype
) -> None:
    """A scale for each output and each row; the error is that of the rounding, for any size and dtype."""
    torch.manual_seed(3)
    weights = [torch.randn(out_features - 7, in_features).to(dtype), torch.randn(7, in_features).to(dtype)]
    bias, rows = torch.randn(out_features).to(dtype), torch.randn(9, in_features).to(dtype)
    product = rounded_product(weights, bias, CPU, numbers)
    assert product.kept_as is None
    out = product(rows)
    assert out.dtype is dtype
    whole, exact = torch.cat(weights).double(), rows.double()
    parts = [row_scaled.quantize_rows(x, numbers) for x in (exact.to(dtype), torch.cat(weights))]
    left, right = (part.numbers.double() * part.scales.double()[:, None] for part in parts)
    rounding = torch.finfo(dtype).eps * 8
    torch.testing.assert_close(out.double(), left @ right.t() + bias.double(), rtol=rounding, atol=rounding)
    error = (out.double() - (exact @ whole.t() + bias.double())).norm() / (exact @ whole.t()).norm()
    assert error < (0.015 if numbers is torch.int8 else 0.06)


def test_a_checkpoint_of_float8_is_not_rounded_again() -> None:
    weights, numbers = stored(FORMATS["fp8-rows"][0], 64, 32, dtype=torch.float16)
    product = rounded_product(weights, None, CPU, torch.float8_e4m3fn)
    assert product.kept_as is not None
    assert torch.equal(product.numbers.float() * product.scales[:, None], numbers)
    assert rounded_product(weights, None, CPU, torch.int8).kept_as is None
    blocks, _ = stored(FORMATS["fp8-uneven-blocks"][0], 64, dtype=torch.bfloat16)
    assert rounded_product(blocks, None, CPU, torch.float8_e4m3fn).kept_as is None


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_experts_are_refused_by_name(quantization: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization='{quantization}' of a mixture of experts") as caught:
        CudaBackend().grouped_product(cast(ExpertMatrices, None), LinearOptions(quantization))
    assert caught.value.setting == "quantization"


@pytest.mark.parametrize(
    ("name", "sizes", "dtype"),
    [
        ("fp8-uneven-blocks", (64,), torch.bfloat16),
        ("fp8-rows", (64,), torch.float16),
        ("fp8-rows", (40,), torch.bfloat16),
        ("w8a8", (64,), torch.bfloat16),
    ],
)
def test_what_the_float8_product_lacks(name: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    weights, _ = stored(FORMATS[name][0], *sizes, dtype=dtype)
    assert isinstance(cuda_product(weights, None, CPU, has_float8=True), GroupedProduct)


def test_weights_of_two_kinds_are_widened() -> None:
    (left,), numbers = stored(FORMATS["gptq"][0], 32)
    (right,), more = stored(FORMATS["gptq-8"][0], 32)
    whole = joined([left, right])
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, torch.cat([numbers, more]))
    assert isinstance(cuda_product([left, right], None, CPU, has_float8=False), DenseProduct)


@pytest.mark.parametrize("name", FORMATS)
def test_cuts(name: str) -> None:
    """Outputs are split anywhere, inputs at complete groups; otherwise the values are dequantized."""
    (weight,), numbers = stored(FORMATS[name][0], 64)
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(joined([weight.outputs(slice(40, 64)), weight.outputs(slice(0, 7))]).dense(),  # type: ignore[union-attr]
                       torch.cat([numbers[40:64], numbers[:7]]))  # fmt: skip
    for part in (slice(0, 64), slice(64, 128), slice(3, 50)):
        cut = weight.inputs(part)
        assert torch.equal(cut.dense() if isinstance(cut, QuantizedWeight) else cut, numbers[:, part])
    assert isinstance(weight.inputs(slice(3, 50)), torch.Tensor)


@pytest.mark.parametrize(
    ("dtype", "sizes", "capability", "is_torch"),
    [
        (torch.bfloat16, (16, 8), (9, 0), True),
        (torch.bfloat16, (16, 8), (10, 3), True),
        (torch.bfloat16, (16, 8), (8, 9), False),
        (torch.bfloat16, (16, 8), (12, 0), False),
        (torch.bfloat16, (12, 8), (9, 0), False),
        (torch.float16, (16, 8), (9, 0), False),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_torch_multiplies_experts_only_if_it_has_a_kernel(
    dtype: torch.dtype, sizes: tuple[int, int], capability: tuple[int, int], is_torch: bool, has_bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(CudaBackend, "device", CPU)
    monkeypatch.setattr(CudaBackend, "_capability", lambda _: capability)
    bias = torch.zeros(2, sizes[0], dtype=dtype) if has_bias else None
    matrices = ExpertMatrices.from_tensors(torch.zeros(2, *sizes, dtype=dtype), bias)
    product = CudaBackend().grouped_product(matrices, LinearOptions())
    assert isinstance(product, TorchGroupedProduct if is_torch and not has_bias else StackedProduct)
