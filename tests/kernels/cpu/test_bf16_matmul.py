"""Matmuls of bfloat16 values: compared with a chain of fp32 additions, bit by bit, and with fp64."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numba
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.kernels.cpu.jit.compiler import compiles_for
from pagemill.kernels.cpu.jit.row import F32, VECTOR
from pagemill.kernels.cpu.matmul import amx_tile, bf16
from pagemill.kernels.cpu.matmul.bf16_tile import GROUP, PAIR, PAIRS, Dots, make_tile, native_dots, plain_dots
from pagemill.kernels.cpu.matmul.fp32_tile import NARROW, PANEL, WIDE, Cut
from tests.kernels.cpu.another_cpu import instructions
from tests.kernels.cpu.operands import activations, make

pytestmark = pytest.mark.usefixtures("two_threads")

needs_native = pytest.mark.skipif(not bf16.is_native(), reason="needs a CPU with AVX-512 BF16")


def twin(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The definition: sums the exact fp32 products of rounded operands one by one; in a pair the second comes first."""
    x, weight = x.bfloat16().float(), weight.bfloat16().float()
    if x.shape[1] % PAIR:
        x, weight = (torch.nn.functional.pad(operand, (0, 1)) for operand in (x, weight))
    out = bias.expand(len(x), -1).clone()
    for i in range(0, x.shape[1], PAIR):
        for j in (i + 1, i):
            out += x[:, j, None] * weight[:, j]
    return out


def amx_twin(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The definition for AMX: per group, the first elements of all pairs, then the second ones, then both sums."""
    padding = (0, -x.shape[1] % GROUP)
    x, weight = (torch.nn.functional.pad(operand.bfloat16().float(), padding) for operand in (x, weight))
    out = bias.expand(len(x), -1).clone()
    for group in range(0, x.shape[1], GROUP):
        sums = torch.zeros(PAIR, *out.shape)
        for i in range(group, group + GROUP):
            sums[i % PAIR] += x[:, i, None] * weight[:, i]
        out += sums[0] + sums[1]
    return out


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 60),
    in_features=st.integers(1, 330),
    out_features=st.integers(1, 100),
    seed=st.integers(0, 2**31),
)
def test_equals_the_twin_bit_by_bit(num_rows, in_features, out_features, seed):
    torch.manual_seed(seed)
    weight, packed, bias = make(bf16, in_features, out_features)
    x = activations(num_rows, in_features)
    out = bf16.multiply(x, packed, bias, out_features)
    expected = amx_twin if amx_tile.IS_NATIVE else twin
    assert torch.equal(out, expected(x, weight, bias[:out_features]))


@pytest.mark.parametrize(("in_features", "out_features"), [(576, 960), (1536, 64), (8192, 40)])
def test_differs_from_fp64_by_less_than_its_additions_round(in_features, out_features):
    torch.manual_seed(42)
    weight, packed, bias = make(bf16, in_features, out_features)
    x = activations(141, in_features)
    out = bf16.multiply(x, packed, bias, out_features)
    exact_x, exact_weight = x.bfloat16().double(), weight.bfloat16().double()
    exact = exact_x @ exact_weight.t() + bias[:out_features]
    size_of_terms = exact_x.abs() @ exact_weight.abs().t() + bias[:out_features].abs()
    assert ((out - exact).abs() <= (in_features + GROUP) * 2.0**-24 * size_of_terms).all()


def test_weights_are_packed_as_they_are_and_rounded_if_they_must_be():
    torch.manual_seed(42)
    weight = torch.randn(960, 576)
    panels = bf16.pack(weight).panels
    assert panels.nbytes == 960 * 576 * 2
    assert torch.equal(bf16.pack(weight.bfloat16()).panels, panels)


def runner(dots: Dots, cut: Cut, num_rows: int) -> Any:
    tile = make_tile(dots, cut)

    @numba.njit
    def run(sums, rows, panel, num_groups):
        tile(
            num_rows, sums, F32 * PANEL, VECTOR, sums, F32 * PANEL, VECTOR, rows, panel, num_groups, panel, 0
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dots", "cut"),
    [
        pytest.param(native_dots, WIDE, marks=needs_native, id="native"),
        pytest.param(native_dots, NARROW, marks=needs_native, id="native narrow"),
        pytest.param(plain_dots, WIDE, id="plain"),
        pytest.param(plain_dots, NARROW, id="plain narrow"),
    ],
)
def test_every_cpu_computes_the_same(dots, cut):
    torch.manual_seed(3)
    num_rows, num_groups = 3, 5
    x, weight = activations(num_rows, num_groups * GROUP), torch.randn(PANEL, num_groups * GROUP)
    rows = x.bfloat16().view(num_rows, num_groups, GROUP).transpose(0, 1).contiguous()
    packed = weight.bfloat16().view(PANEL, num_groups, PAIRS, PAIR).permute(1, 2, 0, 3).contiguous()
    start = torch.randn(num_rows, PANEL)
    sums = start.clone()
    run = runner(dots, cut, num_rows)
    run(sums.data_ptr(), rows.data_ptr(), packed.data_ptr(), num_groups)
    assert torch.equal(sums, twin(x, weight, start))


REFUSED = """
import pagemill.kernels.cpu.jit.compiler as compiler

compiler._may_use_amx = lambda: False
compiler._drop_refused_features()
from pagemill.kernels.cpu.matmul import amx_tile, bf16
assert not amx_tile.IS_NATIVE and bf16.is_native()
import torch
from tests.kernels.cpu.operands import activations, make
from tests.kernels.cpu.test_bf16_matmul import twin
torch.manual_seed(3)
weight, packed, bias = make(bf16, 100, 40)
x = activations(17, 100)
assert torch.equal(bf16.multiply(x, packed, bias, 40), twin(x, weight, bias[:40]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not amx_tile.IS_NATIVE, reason="needs a CPU with AMX")
def test_amx_is_left_alone_where_the_system_refuses_it():
    subprocess.run([sys.executable, "-c", REFUSED], check=True)


TARGET = (
    "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx2", "fma", "f16c", "avx", "evex512",
)  # fmt: skip
INSTRUCTIONS = """
import numba
from pagemill.kernels.cpu.matmul import bf16_tile, fp32_tile
assert bf16_tile.IS_NATIVE and fp32_tile.CUT == fp32_tile.WIDE
tile = bf16_tile.make_tile(bf16_tile.native_dots, fp32_tile.WIDE)
@numba.njit
def run(sums, rows, panel, num_groups):
    tile(14, sums, 128, 64, sums, 128, 64, rows, panel, num_groups, panel, 64)
run.compile("void(int64, int64, int64, int64)")
"""


@pytest.mark.slow
def test_a_tile_for_such_a_cpu_keeps_its_sums_in_registers(tmp_path):
    """Compiled for a CPU that may differ from this one."""
    lines = instructions(INSTRUCTIONS, "cooperlake", TARGET, tmp_path)
    products = [line for line in lines if line[0] == "vdpbf16ps"]
    assert len(products) == 28, "a tile is 14 rows by two vectors"
    assert len({line[-1] for line in products}) == 28, "sums share registers"
    loop = slice(lines.index(products[0]), lines.index(products[-1]))
    stores = [line for line in lines[loop] if line[0].startswith("vmov") and line[-1].endswith(")")]
    assert not stores, "sums leave their registers"
    assert compiles_for("avx512bf16") == bf16.is_native()
