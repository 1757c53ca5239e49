"""Weights kept in few bits: every value is restored, and matmuls return the same."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.kernels.cpu.matmul import fp32
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.cpu.matmul.weight_formats import (
    BFLOAT16,
    BYTES,
    FLOAT16,
    FLOAT32,
    GROUP,
    NIBBLES,
    panel_bytes,
)
from pagemill.kernels.cpu.matmul.weight_packing import PackedWeight, pack, pack_merged

pytestmark = [
    pytest.mark.skipif(not fp32.is_supported(), reason="made for AVX2 and AVX-512"),
    pytest.mark.usefixtures("two_threads"),
]

FORMATS = (FLOAT32, BFLOAT16, FLOAT16, BYTES, NIBBLES)
SHAPES = [(1, 32), (33, 64), (100, 288), (64, 1536)]


def weight_in(weight_format: int, out_features: int, in_features: int) -> torch.Tensor:
    """Random weights that this format represents, and no format with fewer bits."""
    torch.manual_seed(out_features + in_features)
    noise = torch.randn(out_features, in_features)
    if weight_format == BFLOAT16:
        return noise.bfloat16().float()
    if weight_format == FLOAT16:
        return noise.half().float()
    if weight_format == FLOAT32:
        return noise
    kind = gguf.GGMLQuantizationType.Q8_0 if weight_format == BYTES else gguf.GGMLQuantizationType.Q4_1
    return through_gguf(noise, kind)


def through_gguf(weight: torch.Tensor, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    quantized = gguf.quants.quantize(weight.numpy(), kind)
    return torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(quantized, kind), dtype=np.float32))


def unpacked(packed: PackedWeight) -> torch.Tensor:
    return packed.of_channels(torch.arange(packed.out_features))


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_smallest_exact_format_is_found(weight_format, shape):
    weight = weight_in(weight_format, *shape)
    packed = pack(weight)
    assert packed.weight_format == weight_format
    assert packed.panels.shape == (-(-shape[0] // PANEL), panel_bytes(weight_format, shape[1]))
    assert torch.equal(unpacked(packed), weight)


@pytest.mark.parametrize("in_features", [1, 31, 100])
@pytest.mark.parametrize("weight_format", [FLOAT32, BFLOAT16, FLOAT16])
def test_halves_need_no_groups(weight_format, in_features):
    weight = weight_in(weight_format, 35, in_features)
    packed = pack(weight)
    assert packed.weight_format == weight_format
    assert torch.equal(unpacked(packed), weight)


@pytest.mark.parametrize(
    ("kind", "weight_format"),
    [
        ("Q4_0", NIBBLES), ("Q4_1", NIBBLES), ("Q5_0", BYTES), ("Q8_0", BYTES), ("BF16", BFLOAT16),
        ("F16", FLOAT16),
    ],
)  # fmt: skip
def test_what_gguf_files_hold_keeps_its_size(kind, weight_format):
    torch.manual_seed(1)
    # Real checkpoints have outliers, channels of little use, and groups of zeros.
    weight = torch.randn(70, 320) * torch.logspace(-6, 1, 70)[:, None]
    weight[3, :64], weight[9, 5] = 0.0, 40.0
    weight = through_gguf(weight, gguf.GGMLQuantizationType[kind])
    packed = pack(weight)
    assert packed.weight_format == weight_format
    assert torch.equal(unpacked(packed), weight)


@pytest.mark.parametrize("weight_format", [BFLOAT16, FLOAT16, BYTES, NIBBLES])
@pytest.mark.parametrize("place", [(0, 0), (99, 287), (47, 100)], ids=str)
def test_one_number_off_by_a_bit_is_kept(weight_format, place):
    weight = weight_in(weight_format, 100, 288)
    while weight[place] == 0.0:  # zero's neighbor would be a denormal
        place = (place[0], (place[1] + 1) % 288)
    weight[place] = torch.nextafter(weight[place], torch.tensor(torch.inf))
    packed = pack(weight)
    assert packed.weight_format == FLOAT32
    assert torch.equal(unpacked(packed), weight)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e-42, 3e38, -0.0])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_odd_numbers_come_back(weight_format, number):
    weight = weight_in(weight_format, 40, 64)
    weight[17, 33] = number
    torch.testing.assert_close(unpacked(pack(weight)), weight, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    levels=st.integers(1, 300),
    scale=st.floats(2.0**-100, 2.0**100, width=32),
    offset=st.floats(-(2.0**100), 2.0**100, width=32),
    seed=st.integers(0, 2**31),
)
def test_any_grid_comes_back(levels, scale, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, levels, (PANEL + 1, GROUP), generator=generator).float()
    weight = torch.addcmul(torch.tensor(offset), numbers, torch.tensor(scale))
    assert torch.equal(unpacked(pack(weight)), weight)


@pytest.mark.parametrize("weight_format", [BFLOAT16, FLOAT16, BYTES, NIBBLES])
def test_products_have_the_bits_of_fp32_weights(weight_format):
    for out_features, in_features in ((100, 288), (800, 1568)):  # complete pieces and not, lines and not
        weight = weight_in(weight_format, out_features, in_features)
        packed, plain = pack(weight), pack(weight, ())
        assert (packed.weight_format, plain.weight_format) == (weight_format, FLOAT32)
        bias = torch.randn(len(plain.panels) * PANEL)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for num_rows in (1, 2, 13, 14, 15, 32, 141, 300):
                x = torch.randn(num_rows, in_features)
                assert torch.equal(fp32.multiply(x, packed, bias), fp32.multiply(x, plain, bias))


def test_channels_apart_from_their_panels():
    weight = weight_in(NIBBLES, 100, 64)
    channels = torch.tensor([99, 0, 31, 32, 0])
    assert torch.equal(pack(weight).of_channels(channels), weight[channels])


@pytest.mark.parametrize("sizes", [(64, 32, 96), (64, 7), (5, 32, 32), (40,)], ids=str)
@pytest.mark.parametrize("other_format", FORMATS)
def test_weights_below_each_other_are_packed_as_one(sizes, other_format):
    """A format that fits the last one also fits all of them."""
    weights = [weight_in(NIBBLES, size, 64) for size in sizes]
    weights[-1] = weight_in(other_format, sizes[-1], 64)
    together, merged = pack(torch.cat(weights)), pack_merged(weights)
    assert (merged.out_features, merged.in_features) == (sum(sizes), 64)
    assert merged.weight_format == together.weight_format
    assert torch.equal(merged.panels, together.panels)
    assert torch.equal(unpacked(merged), torch.cat(weights))


def test_a_transposed_weight():
    weight = weight_in(NIBBLES, 64, 64)
    assert torch.equal(unpacked(pack(weight.t())), weight.t())
