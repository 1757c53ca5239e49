"""The measurement runs, and charges what it should."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import metrics_cost


def test_every_part_is_charged(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    given = [
        "--model",
        "echo:10",
        "--sequences",
        "4",
        "--tokens",
        "30",
        "--scrape-s",
        "0.1",
        "--out",
        str(path),
    ]
    assert metrics_cost.main(given) == 0
    results = json.loads(path.read_text())
    parts = results["parts"]
    assert parts["recording a step"]["calls"] == 2 * results["steps"]
    assert parts["counting the blocks of a step"]["calls"] >= results["steps"]
    assert parts["snapshots"]["calls"] >= 1
    assert parts["scrapes, every 0.1 s"]["calls"] >= 2
    assert 0 < results["share"] < 1
    assert results["step_ms"] >= 10
