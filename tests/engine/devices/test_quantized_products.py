"""The products that a GPU makes of a quantised checkpoint's weights, computed on the CPU."""

from __future__ import annotations

import pytest
import torch

from pagemill.engine.devices.quantized_products import Float8Product, GroupedProduct, cuda_product
from pagemill.engine.layers.linear import DenseProduct
from pagemill.engine.layers.quantized_weight import QuantizedWeight, Weight, joined
from pagemill.engine.models.quantized.reader import join_parts
from pagemill.engine.models.quantized.registry import find_scheme
from tests.engine.models.quantized.checkpoints import FORMATS, Format

CPU = torch.device("cpu")


def stored(
    form: Format, *sizes: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Weight], torch.Tensor]:
    """Return weights of these outputs and 128 inputs, and the numbers of all."""
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
    """Rows are rounded to e4m3, each by a scale of its own, and nothing else is."""
    weights, numbers = stored(FORMATS[name][0], 64, 32, dtype=torch.bfloat16)
    bias = torch.randn(96).bfloat16()
    rows = (torch.randn(5, 128) * torch.tensor([1e-3, 1.0, 30.0, 1e4, 0.0])[:, None]).bfloat16()
    product = cuda_product(weights, bias, CPU, has_float8=True)
    assert isinstance(product, Float8Product)
    scales = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / 448
    rounded = (rows.float() / scales).to(torch.float8_e4m3fn).float() * scales
    expected = (rounded @ numbers.t()).bfloat16() + bias
    torch.testing.assert_close(product(rows), expected, rtol=2e-2, atol=2e-2)


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
    """Outputs anywhere, inputs at whole groups; elsewhere the numbers."""
    (weight,), numbers = stored(FORMATS[name][0], 64)
    assert isinstance(weight, QuantizedWeight)
    assert torch.equal(joined([weight.outputs(slice(40, 64)), weight.outputs(slice(0, 7))]).dense(),  # type: ignore[union-attr]
                       torch.cat([numbers[40:64], numbers[:7]]))  # fmt: skip
    for part in (slice(0, 64), slice(64, 128), slice(3, 50)):
        cut = weight.inputs(part)
        assert torch.equal(cut.dense() if isinstance(cut, QuantizedWeight) else cut, numbers[:, part])
    assert isinstance(weight.inputs(slice(3, 50)), torch.Tensor)
