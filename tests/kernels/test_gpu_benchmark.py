from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import SECTIONS
from benchmarks.gpu_engine import floor_seconds

_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so_and_leaves(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--section", "machine", "--out", str(tmp_path / "out")],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "no CUDA device" in run.stderr
    assert not (tmp_path / "out").exists()


def _dry_run(out: Path, *arguments: str) -> dict[str, list[dict[str, object]]]:
    """What a walk over toy sizes reports, in the interpreter and on the CPU."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--dry-run", "--out", str(out)]
    run = subprocess.run(
        [*command, *arguments],
        cwd=_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"\n{run.stdout}\n{run.stderr}"
    found: dict[str, list[dict[str, object]]] = json.loads((out / "gpu.json").read_text())
    return found


@pytest.mark.timeout(900)
def test_every_kernel_section_walks_through(tmp_path: Path) -> None:
    """Nothing may be left for the GPU's minutes to find."""
    sections = [name for name in SECTIONS if not name.startswith(("engine", "peer", "switches"))]
    chosen = [word for name in sections for word in ("--section", name)]
    found = _dry_run(tmp_path, "--budget", "1000", *chosen)
    assert list(found) == sections
    assert not any("left_out" in row or "error" in row for rows in found.values() for row in rows)
    assert all(row["ok"] for row in found["correctness"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_walk(tmp_path: Path) -> None:
    """With engines, of which each has a process that loads torch and transformers."""
    found = _dry_run(tmp_path, "--budget", "1800")
    assert list(found) == list(SECTIONS)
    assert not any("left_out" in row or "error" in row for rows in found.values() for row in rows)
    assert found["switches"][0]["ok"]
    assert found["engine llama-3.1-8b"][0]["output_tokens"]
    assert found["peer qwen3-0.6b"][0]["ended"] == 3
    assert "pagemill_over_it" in found["peer qwen3-0.6b"][0]


def test_a_section_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    found = _dry_run(tmp_path, "--budget", "20", "--section", "machine", "--section", "decode")
    assert found["machine"][0]["fact"] == "python"
    assert "left_out" in found["decode"][0]


def test_the_floor_counts_operations_and_bytes() -> None:
    """One layer's worth by hand: products of the prompts, then weights and keys once per step."""
    ceilings = {"bf16_tflop_per_s": 1e-6, "copy_gb_per_s": 1e30}
    layer = 64 * (2 * 256 + 2 * 128 + 3 * 96)
    products = 2 * 5 * layer * 2 + 4 * (5**2 / 2) * 256 * 2
    assert floor_seconds("tiny", [[1] * 5], [3], ceilings) == pytest.approx(products / 1e6)
    ceilings = {"bf16_tflop_per_s": 1e30, "copy_gb_per_s": 1e-3}
    weights, keys = 2 * (layer * 2 + 64 * 512), 2 * 2 * 128 * 2
    expected = (2 * weights + (5 * 3 + 3) * keys) / 1e6
    assert floor_seconds("tiny", [[1] * 5], [3], ceilings) == pytest.approx(expected)
