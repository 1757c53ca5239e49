"""The kernel sections of `benchmarks.gpu` with the Triton kernels themselves, interpreted, on toy shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import attention
from benchmarks.gpu.attention import TOY
from benchmarks.gpu.registry import SECTIONS
from benchmarks.gpu.run import bench_of
from benchmarks.gpu.section import Bench, Row, Scale
from benchmarks.gpu.sections import launches, tiles
from pagemill.kernels.gpu.tuning import Tile

_BENCH = bench_of("cpu", Scale.TINY)
_KERNELS = {"launches", "correctness", "decode", "ragged", "prefill", "sampling", "fp8-kv", "fused", "tiles"}


@pytest.mark.parametrize(
    "section", [section for section in SECTIONS if section.name in _KERNELS], ids=lambda section: section.name
)
def test_sections_launch_the_kernels(section: object) -> None:
    assert _BENCH.face == "triton"
    rows = list(section.run(_BENCH))  # type: ignore[attr-defined]
    assert rows
    assert all(row.ok is not False and row.measured is not None for row in rows)


def test_correctness_reports_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.TOLERANCE, torch.float32, 0.0)
    row = next(attention.correctness(_BENCH, launches.TINY_CASES, [torch.float32]))
    assert row.ok is False
    assert "error" in row.facts["why"]


def _tiles(bench: Bench) -> list[Row]:
    candidates = [Tile(16, 32, 4, 1), Tile(16, 64, 4, 1)]
    return [
        *tiles.timed_decode(bench, TOY, [(1, 40)], candidates),
        *tiles.timed_prefill(bench, TOY, 24, candidates),
    ]


def test_a_tile_that_has_no_room_does_not_end_the_others() -> None:
    calls = 0

    def refuse_the_second(run: object) -> float:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return 1e-3

    rows = _tiles(replace(_BENCH, measure=refuse_the_second))
    assert [row.measured for row in rows] == [2.5e-4, None, 1e-3, 1e-3]  # four layers of decode
    assert "shared memory" in rows[1].facts["why"]
