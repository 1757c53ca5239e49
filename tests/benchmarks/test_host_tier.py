"""The benchmark of the host tier runs, with its expected results: hits for evicted prefixes, equal outputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.engines import host_tier


@pytest.mark.slow
def test_the_tier_computes_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "result.json"
    arguments = ["--layers", "2", "--width", "64", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["host_tier", *arguments])
    host_tier.main()
    runs = {run["workload"]: run for run in json.loads(out.read_text())["runs"]}
    assert all(run["equal_outputs"] for run in runs.values())
    documents, pressure = runs["documents"], runs["pressure"]
    assert documents["tier"]["host_hit_tokens"] > 0
    assert documents["tier"]["computed_tokens"] < 0.7 * documents["none"]["computed_tokens"]
    assert pressure["tier"]["preemptions"] > 0
    assert pressure["tier"]["computed_tokens"] <= pressure["none"]["computed_tokens"]
