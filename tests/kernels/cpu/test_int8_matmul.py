"""Matmuls of 8-bit integers: the packed kernel against the plain version, bit by bit, and the latter against fp64."""

from __future__ import annotations

import functools
from typing import Any

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.kernels import grouped_int8
from pagemill.kernels.cpu.jit.compiler import compiles_for
from pagemill.kernels.cpu.jit.row import F32
from pagemill.kernels.cpu.matmul import grids, int8
from pagemill.kernels.cpu.matmul.converted import convert_rows
from pagemill.kernels.cpu.matmul.fp32_tile import NARROW, PANEL, WIDE, Cut
from pagemill.kernels.cpu.matmul.int8_tile import (
    BYTES,
    EIGHT_BITS,
    EIGHT_BITS_HALVES,
    FORMATS,
    FOUR_BITS_HALVES,
    FOUR_BITS_OFFSET,
    FOUR_BITS_OFFSET_HALVES,
    PRODUCTS,
    QUAD,
    QUADS,
    ROW_BYTES,
    SHIFTED,
    WORDS,
    ZERO_POINT,
    Products,
    make_tile,
)
from pagemill.kernels.cpu.matmul.kinds import INTEGERS
from pagemill.kernels.grouped_int8 import GROUP
from tests.kernels.cpu.another_cpu import instructions
from tests.kernels.cpu.operands import activations, make

NUM_ROWS = 3


pytestmark = pytest.mark.usefixtures("two_threads")


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.shape == right.shape
    assert torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 60),
    in_features=st.integers(1, 330),
    out_features=st.integers(1, 100),
    seed=st.integers(0, 2**31),
)
def test_equals_the_twin_bit_by_bit(num_rows, in_features, out_features, seed):
    torch.manual_seed(seed)
    weight, packed, bias = make(int8, in_features, out_features)
    x = activations(num_rows, in_features)
    out = int8.multiply(x, packed, bias, out_features)
    assert_same_bits(out, grouped_int8.multiply(x, *grouped_int8.quantize(weight), bias[:out_features]))


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (1536, 64), (14336, 40)])
def test_equals_the_twin_at_sizes_of_models(in_features, out_features):
    torch.manual_seed(42)
    weight, packed, bias = make(int8, in_features, out_features)
    x = activations(141, in_features)
    out = int8.multiply(x, packed, bias, out_features)
    assert_same_bits(out, grouped_int8.multiply(x, *grouped_int8.quantize(weight), bias[:out_features]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 9), size=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_the_twin_is_exact_but_for_the_rounding_of_its_operands(num_rows, size, seed):
    torch.manual_seed(seed)
    x, weight, bias = activations(num_rows, size), torch.randn(7, size), torch.randn(7)
    numbers, scales = grouped_int8.quantize(x)
    restored = (numbers.double() * scales.double()[..., None]).flatten(1)
    assert (restored[:, size:] == 0.0).all()
    steps = scales.repeat_interleave(GROUP, dim=1)[:, :size]
    assert ((restored[:, :size] - x).abs() <= 0.50001 * steps).all(), "not to nearest"
    assert numbers.abs().amax() <= 127
    weight_numbers, weight_scales = grouped_int8.quantize(weight)
    exact = restored @ (weight_numbers.double() * weight_scales.double()[..., None]).flatten(1).t() + bias
    out = grouped_int8.multiply(x, weight_numbers, weight_scales, bias)
    size_of_terms = restored.abs() @ torch.full((restored.shape[1], 7), 4.0, dtype=torch.float64) + 4
    assert ((out.double() - exact).abs() <= 1e-6 * size_of_terms).all()


def test_a_group_costs_its_own_precision_alone():
    """An outlier of 1e4: its group is lost, the others are not."""
    torch.manual_seed(42)
    x = torch.randn(1, 2 * GROUP)
    x[0, 3] = 1e4
    numbers, scales = grouped_int8.quantize(x)
    restored = (numbers * scales[..., None]).flatten(1)
    assert (restored[0, 4:GROUP] == 0.0).all()
    torch.testing.assert_close(restored[0, GROUP:], x[0, GROUP:], rtol=0, atol=0.02)


def test_weights_take_little_more_than_a_byte_each():
    packed = int8.pack(torch.randn(960, 576))
    assert packed.panels.nbytes <= 960 * 576 * 1.13


def integers(weight_format: int, out_features: int, num_groups: int) -> torch.Tensor:
    """Create a weight of integers of this format, all at its limits in the first group."""
    low, high = {
        grids.SIGNED_BYTES: (-127, 127), grids.SIGNED_NIBBLES: (-8, 7), grids.OFFSET_NIBBLES: (0, 15)
    }[int8.GRIDS[weight_format]]  # fmt: skip
    has_offsets = FORMATS[weight_format].has_offsets
    numbers = torch.randint(low, high + 1, (out_features, num_groups, GROUP)).float()
    numbers[:, :, 1] = high
    numbers[:, 0] = high
    numbers[out_features // 2 :, 0] = low
    numbers[:, :, 0] = low  # the offset is the lowest value
    scales = (torch.rand(out_features, num_groups, 1) + 0.1).half().float()
    offsets = torch.randn(out_features, num_groups, 1).half().float()
    if FORMATS[weight_format].factor_bytes == F32:
        scales *= 1.0 + 2.0**-7  # seven bits more than fp16
    weight = numbers * scales + (offsets if has_offsets else 0.0)
    return weight.flatten(1)


def twin(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, weight_format: int = EIGHT_BITS
) -> torch.Tensor:
    """The definition of the matmul with a weight whose integers this format finds."""
    found = grids.find(weight, int8.GRIDS[weight_format])
    assert found is not None
    restored = found.numbers * found.scales[..., None] + found.offsets[..., None]
    torch.testing.assert_close(restored.flatten(1), weight, rtol=1e-6, atol=1e-6)
    offsets = found.offsets if FORMATS[weight_format].has_offsets else None
    return grouped_int8.multiply(x, found.numbers, found.scales, bias, offsets)


BYTES_A_WEIGHT = {
    EIGHT_BITS: 1.125, EIGHT_BITS_HALVES: 1.0625, FOUR_BITS_HALVES: 0.5625, FOUR_BITS_OFFSET: 0.75,
    FOUR_BITS_OFFSET_HALVES: 0.625,
}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    weight_format=st.sampled_from(int8.SMALLEST_FIRST), num_rows=st.integers(1, 60),
    num_groups=st.integers(2, 20), out_features=st.integers(1, 100), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_a_files_own_integers_are_kept(weight_format, num_rows, num_groups, out_features, seed):
    torch.manual_seed(seed)
    weight = integers(weight_format, out_features, num_groups)
    packed = int8.pack(weight)
    assert packed.weight_format == weight_format
    assert packed.panels[0].nbytes == PANEL * num_groups * GROUP * BYTES_A_WEIGHT[weight_format]
    bias = torch.randn(len(packed.panels) * PANEL)
    x = activations(num_rows, num_groups * GROUP)
    out = int8.multiply(x, packed, bias, out_features)
    assert_same_bits(out, twin(x, weight, bias[:out_features], weight_format))


def test_signed_integers_of_four_bits_say_the_same_in_eight():
    torch.manual_seed(42)
    weight, x = integers(FOUR_BITS_HALVES, 70, 9), activations(20, 9 * GROUP)
    bias = torch.randn(3 * PANEL)
    small, large = int8.pack(weight), int8.pack(weight, (EIGHT_BITS,))
    assert small.weight_format == FOUR_BITS_HALVES
    out = int8.multiply(x, small, bias, 70)
    torch.testing.assert_close(
        out, int8.multiply(x, large, bias, 70), rtol=0, atol=1e-6 * float(out.abs().max())
    )


def test_scales_of_either_sign():
    """llama.cpp's Q4_0: the value with the largest magnitude has the code of -8."""
    torch.manual_seed(42)
    numbers = torch.randint(-8, 8, (40, 4, GROUP)).float()
    numbers[:, :, 0] = -8
    scales = torch.randn(40, 4, 1).half().float()
    weight, x, bias = (numbers * scales).flatten(1), activations(5, 4 * GROUP), torch.randn(2 * PANEL)
    packed = int8.pack(weight)
    assert packed.weight_format == FOUR_BITS_HALVES
    expected = grouped_int8.multiply(x, numbers, scales[..., 0], bias[:40])
    assert_same_bits(int8.multiply(x, packed, bias, 40), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_number_off_the_grid_is_rounded_with_its_weight(bad):
    torch.manual_seed(42)
    weight = integers(FOUR_BITS_HALVES, 40, 3)
    weight[7, 50] += 0.01
    weight[11, 9] = bad
    packed, bias = int8.pack(weight), torch.randn(2 * PANEL)
    assert packed.weight_format == EIGHT_BITS
    x = activations(3, 3 * GROUP)
    out = int8.multiply(x, packed, bias, 40)
    expected = grouped_int8.multiply(x, *grouped_int8.quantize(weight), bias[:40])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def test_weights_of_several_forms_are_packed_in_the_largest():
    torch.manual_seed(42)
    weights = [
        integers(form, 40, 3)
        for form in (FOUR_BITS_HALVES, FOUR_BITS_HALVES, FOUR_BITS_OFFSET, FOUR_BITS_HALVES)
    ]
    packed = int8.pack_each(weights.__getitem__, 4)
    assert packed.weight_format == FOUR_BITS_OFFSET
    alone = [int8.pack(weight, (FOUR_BITS_OFFSET,)) for weight in weights]
    assert torch.equal(packed.panels, torch.stack([each.panels for each in alone]))
    packed = int8.pack_each([*weights, torch.randn(40, 3 * GROUP)].__getitem__, 5)
    assert packed.weight_format == EIGHT_BITS


def rows_for(products: Products, x: torch.Tensor) -> torch.Tensor:
    """Return quantized rows in the layout of `make_tile(products, ...)`: [num_groups, num_rows, bytes]."""
    numbers, scales = grouped_int8.quantize(x)  # [num_rows, num_groups, GROUP], [num_rows, num_groups]
    order = [quad + i for quad in range(0, GROUP, QUAD) for part in products.parts for i in part]
    dtype = torch.int8 if products.number_bytes == 1 else torch.int16
    sums = numbers.sum(dim=2, dtype=torch.int32, keepdim=True)
    fields = [numbers[..., order].to(dtype), scales[..., None], -ZERO_POINT * sums, sums * scales[..., None]]
    fields += [numbers.to(torch.int8)] if products.number_bytes > 1 else []
    rows = torch.cat([field.contiguous().view(torch.uint8) for field in fields], dim=2)
    assert rows.shape[2] == products.row_bytes
    return rows.transpose(0, 1).contiguous()


@functools.cache
def runner(products: Products, cut: Cut, weight_format: int) -> Any:
    tile = make_tile(products, cut, FORMATS[weight_format])

    @numba.njit
    def run(num_rows, sums, rows, panel, num_groups):
        tile(num_rows, sums, rows, panel, num_groups, panel, 64)

    return run


def test_rows_are_quantized_as_the_tiles_read_them():
    x = activations(NUM_ROWS, 5 * GROUP)
    rows = torch.empty(NUM_ROWS * 5 * ROW_BYTES, dtype=torch.uint8)
    convert_rows(INTEGERS, 0, NUM_ROWS, NUM_ROWS, x.data_ptr(), x.stride(0), rows.data_ptr(), x.shape[1])
    assert torch.equal(rows, rows_for(PRODUCTS, x).flatten())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("products", "feature", "cut"),
    [
        pytest.param(SHIFTED, None, NARROW, id="any"),
        pytest.param(WORDS, "avx2", NARROW, id="avx2"),
        pytest.param(WORDS, "avx2", WIDE, id="avx512"),
        pytest.param(BYTES, "avx512vnni", WIDE, id="vnni"),
    ],
)
@pytest.mark.parametrize("weight_format", int8.SMALLEST_FIRST)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), num_groups=st.integers(1, 12), seed=st.integers(0, 2**31))
def test_every_cpu_computes_the_same_at_every_height(
    products, feature, cut, weight_format, data, num_groups, seed
):
    if feature is not None and not compiles_for(feature):
        pytest.skip(f"needs {feature}")
    torch.manual_seed(seed)
    num_rows = data.draw(st.integers(1, cut.most_rows), label="num_rows")
    weight = integers(weight_format, PANEL, num_groups)
    x = activations(num_rows, num_groups * GROUP)
    x[0, :GROUP] = 3.0  # the largest sums, of either sign
    packed, start = int8.pack(weight, (weight_format,)), torch.randn(PANEL)
    assert packed.weight_format == weight_format
    sums, after = start.expand(num_rows + 1, PANEL).contiguous().split([num_rows, 1])
    rows = rows_for(products, x)
    run = runner(products, cut, weight_format)
    run(num_rows, sums.data_ptr(), rows.data_ptr(), packed.panels.data_ptr(), num_groups)
    assert_same_bits(sums, twin(x, weight, start, weight_format))
    assert torch.equal(after[0], start), "a row too many"


TARGET = "avx512f avx512bw avx512dq avx512vl avx512vnni avx2 fma f16c avx evex512"
INSTRUCTIONS = """
import numba
from pagemill.kernels.cpu.matmul import fp32_tile, int8_tile
assert int8_tile.PRODUCTS is int8_tile.BYTES and fp32_tile.CUT == fp32_tile.WIDE
tile = int8_tile.make_tile(int8_tile.BYTES, fp32_tile.WIDE, int8_tile.FORMATS[{form}])
@numba.njit
def run(sums, rows, panel, num_groups, ahead, ahead_step):
    tile(14, sums, rows, panel, num_groups, ahead, ahead_step)
run.compile("void(int64, int64, int64, int64, int64, int64)")
"""


# Formats with offsets are excluded: the mask of half bytes is read again, because no register is free for it.
@pytest.mark.slow
@pytest.mark.parametrize("weight_format", [EIGHT_BITS, EIGHT_BITS_HALVES, FOUR_BITS_HALVES])
def test_a_tile_for_such_a_cpu_keeps_a_groups_weights_in_registers(tmp_path, weight_format):
    """Compiled for a CPU that may differ from this one."""
    program, form = INSTRUCTIONS.format(form=weight_format), FORMATS[weight_format]
    lines = instructions(program, "cascadelake", TARGET.split(), tmp_path)
    num_rows, halves = WIDE.most_rows, WIDE.halves
    products = [line for line in lines if line[0] == "vpdpbusd"]
    assert len(products) == num_rows * halves * QUADS
    assert all(line[-3].startswith("%zmm") for line in products), "weights are read for each row"
    whole = [line for line in lines if line[0].startswith(("vmov", "vcvtph")) and line[-1].startswith("%zmm")]
    loads = [line for line in whole if line[1].endswith("),")]
    constants = [line for line in loads if line[0] in ("vmovdqa64", "vmovaps")]  # the aligned ones
    assert len(constants) <= 1, "a mask of halves of bytes"
    num_blocks = -(-num_rows // 3)
    assert len(loads) - len(constants) == halves * (form.weight_lines + form.num_factors * num_blocks), (
        "weights, and scales by three rows"
    )
    stores = [line for line in lines if line[0].startswith("vmov") and line[-1].endswith(")")]
    assert len(stores) == num_rows * halves, "sums leave their registers once a group"
    assert not any("%rsp" in operand for line in loads + stores for operand in line), "registers are spilt"
