from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.dry_run import dry_run


@pytest.mark.slow
def test_a_dry_run_measures_all_sides_and_they_agree(tiny_llama: Path, tmp_path: Path) -> None:
    words = ["--workloads", "mixed", "--rounds", "1", "--share", "0.1", "--kv-cache-gib", "1"]
    report, finished = dry_run(
        "benchmarks.worker_overhead", tmp_path / "report.json", "--model", str(tiny_llama), *words
    )
    measured = report["workloads"]["mixed"]
    for way in ("thread", "process"):
        assert measured[way]["same_tokens"] == [measured["requests"]] * 2
        assert len(measured[way]["share_of_bare"]) == 1
        assert measured[way]["processor_time_over_bare"][0] > 0
    assert "The worker beside the bare engine" in finished.stdout
