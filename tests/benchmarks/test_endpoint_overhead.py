from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engines.process import ROOT


@pytest.mark.slow
def test_both_sides_are_measured_and_have_the_same_tokens(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "benchmarks.endpoint_overhead", "--concurrency", "2", "--requests", "4", "--tokens", "8",
        "--rate", "20", "--rounds", "1", "--out", str(report),
    ]  # fmt: skip
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    measured = json.loads(report.read_text())
    assert 0 < measured["tokens_per_second"]["direct"][0] <= 2 * 20
    assert 0 < measured["share_of_direct"] < 1.1
    assert measured["first_token_p50_s"]["direct"][0] >= 1 / 20
