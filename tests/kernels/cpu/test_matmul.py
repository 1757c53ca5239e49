"""Matmuls with packed weights compared with fp64, and the dependencies of a row's bits."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import starmap
from typing import Any

import numba
import pytest
import torch

from pagemill.kernels.cpu.jit.compiler import compiles_for
from pagemill.kernels.cpu.jit.row import F32, VECTOR
from pagemill.kernels.cpu.jit.vector import LANES
from pagemill.kernels.cpu.matmul import fp32, int8
from pagemill.kernels.cpu.matmul.fp32_tile import NARROW, PANEL, WIDE, Cut, make_lined_tile, make_tile
from pagemill.kernels.cpu.matmul.weight_packing import PackedWeight, pack
from tests.kernels.cpu.another_cpu import environment_of

pytestmark = [
    pytest.mark.skipif(not fp32.is_supported(), reason="made for AVX2 and AVX-512"),
    pytest.mark.usefixtures("two_threads"),
]

ROWS = [*range(1, 31), 56, 57, 141, 290]


def make(in_features: int, out_features: int) -> tuple[torch.Tensor, PackedWeight, torch.Tensor]:
    """Return (weight, packed, bias), with NaN in the bias of padded channels."""
    torch.manual_seed(42)
    weight = torch.randn(out_features, in_features) * in_features**-0.5
    packed = pack(weight)
    bias = torch.full((len(packed.panels) * PANEL,), torch.nan)
    bias[:out_features] = torch.randn(out_features)
    return weight, packed, bias


@pytest.mark.parametrize(
    ("in_features", "out_features"),
    [(576, 96), (7, 33), (64, 1), (1, 65), (1000, 31), (1600, 40), (100, 800), (15, 770)],
)
def test_equals_fp64(in_features, out_features):
    weight, packed, bias = make(in_features, out_features)
    for num_rows in ROWS:
        x = torch.randn(num_rows, in_features + 3)[:, 1:-2]  # rows with a non-contiguous stride
        out = fp32.multiply(x, packed, bias)
        assert out.shape == (num_rows, out_features)
        expected = x.double() @ weight.double().t() + bias[:out_features].double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


def test_no_rows():
    _, packed, bias = make(8, 40)
    assert fp32.multiply(torch.empty(0, 8), packed, bias).shape == (0, 40)


def test_a_row_depends_neither_on_its_neighbours_nor_on_the_threads():
    out_features = 2 * fp32.LINED_PANELS * PANEL + 8  # in lines, for two threads too
    _, packed, bias = make(790, out_features)
    x = torch.randn(300, 790)
    whole = fp32.multiply(x, packed, bias)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in ROWS:
            first = (37 * num_rows) % (301 - num_rows)
            part = fp32.multiply(x[first : first + num_rows], packed, bias)
            assert torch.equal(part, whole[first : first + num_rows])


def test_nan_and_infinity_stay_in_their_row():
    _, packed, bias = make(64, 40)
    x = torch.randn(20, 64)
    clean = fp32.multiply(x, packed, bias)
    x[3, 5], x[17, 9] = torch.nan, torch.inf
    out = fp32.multiply(x, packed, bias)
    assert out[3].isnan().all()
    assert not out[17].isfinite().any()
    others = [row for row in range(20) if row not in (3, 17)]
    assert torch.equal(out[others], clean[others])


def tile_runners(cut: Cut) -> tuple[Any, Any]:
    tile, lined_tile = make_tile(cut), make_lined_tile(cut)

    @numba.njit
    def run(num_rows, out, x, panel, start, depth):
        tile(num_rows, out, F32 * PANEL, x, F32 * depth, panel, start, F32 * PANEL, depth, panel, 0)

    @numba.njit
    def run_lined(num_rows, out, x, panel, start, depth):
        lined_tile(
            num_rows, out, F32 * PANEL, VECTOR, start, F32 * PANEL, VECTOR, x, panel, depth // LANES, panel, 0
        )

    return run, run_lined


@pytest.fixture(scope="module")
def runners():
    return tile_runners(NARROW), tile_runners(WIDE)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", range(1, NARROW.most_rows + 1))
def test_tiles_agree_however_they_are_cut(runners, num_rows):
    torch.manual_seed(num_rows)
    depth = 3 * LANES
    x, panel, start = torch.randn(num_rows, depth), torch.randn(depth, PANEL), torch.randn(num_rows, PANEL)
    lines = x.view(num_rows, -1, LANES).transpose(0, 1).contiguous()
    results = []
    for run, run_lined in runners:
        for runner, rows in ((run, x), (run_lined, lines)):
            out = torch.full((num_rows, PANEL), torch.nan)
            runner(num_rows, out.data_ptr(), rows.data_ptr(), panel.data_ptr(), start.data_ptr(), depth)
            results.append(out)
    torch.testing.assert_close(results[0], start + x @ panel)
    assert all(torch.equal(out, results[0]) for out in results)


HASWELL = (
    *("avx", "avx2", "bmi", "bmi2", "cx16", "f16c", "fma", "lzcnt", "movbe", "popcnt"),
    *("sse", "sse2", "sse3", "sse4.1", "sse4.2", "ssse3"),
)
AVX2_PRODUCTS = """
import sys, torch
from pagemill.kernels.cpu.matmul import fp32, fp32_tile, int8, int8_tile
from pagemill.kernels.cpu.matmul.weight_packing import pack
assert fp32_tile.CUT == fp32_tile.NARROW
assert int8_tile.PRODUCTS is int8_tile.WORDS
given, out = sys.argv[1:]
results = []
for weight, bias, rows in torch.load(given):
    for x in rows:
        results.append(fp32.multiply(x, pack(weight), bias))
        results.append(int8.multiply(x, int8.pack(weight), bias, len(weight)))
torch.save(results, out)
"""


@pytest.mark.slow
@pytest.mark.skipif(not all(map(compiles_for, ("avx2", "fma", "f16c"))), reason="runs what is made for AVX2")
def test_avx2_computes_the_same_as_this_cpu(tmp_path):
    """On a CPU with AVX-512, no other test uses the narrow tiles."""
    torch.manual_seed(7)
    cases, expected = [], []
    for in_features, out_features in ((576, 800), (100, 33)):
        weight = torch.randint(0, 16, (out_features, in_features)) / 16 - 0.5  # in four bits
        weight = weight if in_features == 576 else torch.randn_like(weight)
        bias = torch.randn(-(-out_features // PANEL) * PANEL)
        rows = [torch.randn(num_rows, in_features) for num_rows in (1, 7, 29, 150, 290)]
        cases.append((weight, bias, rows))
        for x in rows:
            expected.append(fp32.multiply(x, pack(weight), bias))
            packed = int8.pack(weight)
            expected.append(int8.multiply(x, packed, bias, out_features))
    given, out = tmp_path / "given.pt", tmp_path / "out.pt"
    torch.save(cases, given)
    environment = environment_of("haswell", HASWELL)
    subprocess.run([sys.executable, "-c", AVX2_PRODUCTS, str(given), str(out)], env=environment, check=True)
    assert all(starmap(torch.equal, zip(torch.load(out), expected, strict=True)))


TALL_PRODUCTS = """
import torch
from pagemill.kernels.cpu.matmul import fp32, weight_packing
torch.set_num_threads(1)
packed, x = weight_packing.pack(torch.randn(1024, 96)), torch.randn(64, 96)
for _ in range(20):
    fp32.multiply(x, packed, torch.zeros(1024))
"""


@pytest.mark.slow
def test_a_kernels_arrays_outlive_the_addresses_it_takes_of_them():
    """With separately mapped arrays, any read of freed memory is a segmentation fault."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run([sys.executable, "-c", TALL_PRODUCTS], env=environment, check=False)
    assert done.returncode == 0
