from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engines.process import ROOT


@pytest.mark.slow
def test_a_dry_run_measures_all_sides_and_they_agree(tiny_llama: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "benchmarks.worker_overhead", "--model", str(tiny_llama), "--workloads", "mixed",
        "--rounds", "1", "--share", "0.1", "--kv-cache-gib", "1", "--out", str(report),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False
    )
    assert finished.returncode == 0, finished.stderr
    measured = json.loads(report.read_text())["workloads"]["mixed"]
    for way in ("thread", "process"):
        assert measured[way]["same_tokens"] == [measured["requests"]] * 2
        assert len(measured[way]["share_of_bare"]) == 1
        assert measured[way]["processor_time_over_bare"][0] > 0
    assert "The worker beside the bare engine" in finished.stdout
