"""The kernel sections of `benchmarks.gpu` with the Triton kernels themselves, interpreted, on toy shapes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import attention
from benchmarks.gpu.registry import SECTIONS
from benchmarks.gpu.run import bench_of
from benchmarks.gpu.section import Scale
from benchmarks.gpu.sections import correctness

_BENCH = bench_of("cpu", Scale.TINY)
_KERNELS = {"launches", "correctness", "decode", "ragged", "prefill", "sampling", "fp8-kv", "fused"}


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
    row = next(attention.correctness(_BENCH, correctness.TINY_CASES, [torch.float32]))
    assert row.ok is False
    assert "error" in row.facts["why"]
