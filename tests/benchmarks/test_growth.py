from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engines.process import ROOT
from benchmarks.growth import SIZES, Point, chosen_sizes, plot, with_theory


def points(*times: float) -> list[Point]:
    return [Point(2**number, seconds, 1 / seconds, 2**30) for number, seconds in enumerate(times)]


def test_theory_is_a_straight_line_and_a_knee_stands_off_it() -> None:
    straight = with_theory(points(3.0, 5.0, 9.0, 17.0))  # 1 + 2 * size
    assert [point.theory_seconds for point in straight] == pytest.approx([3.0, 5.0, 9.0, 17.0])
    bent = with_theory(points(3.0, 5.0, 9.0, 60.0))
    assert any(abs((point.theory_seconds or 0) / point.seconds - 1) > 0.2 for point in bent)


@pytest.mark.parametrize("name", SIZES)
def test_the_smallest_dry_run_has_a_line_to_draw(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are drawn by the bench extra")
    assert chosen_sizes(name, None) == SIZES[name]
    assert chosen_sizes(name, 256)[-1] == 256 or name == "batch"
    sizes = chosen_sizes(name, 1)
    assert sizes == SIZES[name][:2]
    few = with_theory([Point(size, 1.0 + size, 1.0, 2**30) for size in sizes])
    assert plot(name, few, "a machine, a date", tmp_path) is not None


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots are drawn by the bench extra")
    path = plot("batch", with_theory(points(3.0, 5.0, 9.0)), "a machine, a date", tmp_path)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_dry_run_makes_every_sweep(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "growth.json"
    command = [
        sys.executable, "-m", "benchmarks.growth", "--model", str(tiny_llama), "--largest", "256", "--repeats", "1",
        "--kv-cache-gib", "1", "--out", str(path), "--images", str(tmp_path),
    ]  # fmt: skip
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert finished.returncode == 0, finished.stderr
    sweeps = json.loads(path.read_text())["sweeps"]
    assert set(sweeps) == {"batch", "context", "prefix", "pool"}
    assert all(point["tokens_per_second"] > 0 for found in sweeps.values() for point in found)
