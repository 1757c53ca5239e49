"""Progress reports of kernel compilations: when they finish, at a limited rate, and without cached kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

import numba

from pagemill.kernels.cpu.jit.progress import report_compiling


def test_reports_what_has_been_compiled() -> None:
    @numba.njit
    def inner(x: int) -> int:
        return x + 1

    @numba.njit
    def outer(x: int) -> int:
        return inner(x) + 1  # type: ignore[no-any-return]

    reports: list[tuple[int, float]] = []

    def note(count: int, seconds: float) -> None:
        reports.append((count, seconds))

    with report_compiling(note, every=0.0):
        assert outer(1) == 3
        assert [count for count, _ in reports] == [1, 2]  # callees are compiled first
        assert outer(2) == 4
    assert len(reports) == 2
    assert all(seconds >= 0 for _, seconds in reports)
    with report_compiling(note, every=3600.0):
        assert outer(1.5) == 3.5
    assert outer(True) == 3
    assert len(reports) == 2
