from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measure
from benchmarks.throughput import ROOT, Measurements
from benchmarks.workloads import chat


def result(tokens_per_second: float, outputs: list[list[int]]) -> dict[str, Any]:
    count = sum(len(output) for output in outputs)
    timing = measure.Timing("chat", count / tokens_per_second, count, outputs)
    return {"timings": [{name: getattr(timing, name) for name in timing.__slots__}]}


def test_the_ratio_is_the_median_over_rounds() -> None:
    same = [[1, 2], [3, 4]]
    measurements = Measurements(
        {
            "pagemill": [result(rate, same) for rate in (20.0, 90.0, 40.0)],
            "vllm": [result(rate, same) for rate in (10.0, 30.0, 10.0)],
        }
    )
    assert measurements.ratio("vllm", "chat") == pytest.approx(3.0)
    assert measurements.ratio("transformers", "chat") is None


def test_equal_outputs_are_counted_by_request() -> None:
    measurements = Measurements(
        {
            "pagemill": [result(1.0, [[1, 2], [3, 4], [5, 6]])],
            "transformers": [result(1.0, [[1, 2], [3, 9], [5, 6]])],
        }
    )
    assert measurements.equal_outputs("pagemill", "chat") == (2, 3)


def test_an_engine_that_stops_early_gets_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = chat(1000, 0, share=0.1)
    paths = [tmp_path / "request.json", tmp_path / "result.json"]
    measure.Request("m", [workload], [], 1).write(paths[0])
    monkeypatch.setattr(sys, "argv", ["engine", *map(str, paths)])

    def lazy(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        return [[0] * (count - 1) for count in max_tokens]

    with pytest.raises(RuntimeError, match="chat: request 0 is 127 tokens long, not 128"):
        measure.run(lambda request: (lazy, {}))
    assert not paths[1].exists()


def test_a_dry_run_measures_both_engines_and_they_agree(tiny_llama: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "benchmarks", "--engines", "pagemill", "transformers", "--model", str(tiny_llama),
        "--rounds", "2", "--share", "0.05", "--kv-cache-gib", "1", "--out", str(report),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert finished.returncode == 0, finished.stderr
    measured = json.loads(report.read_text())
    assert set(measured["workloads"]) == {"chat", "mixed", "label"}
    assert {"date", "machine", "versions", "settings"} <= set(measured)
    for name, workload in measured["workloads"].items():
        assert name in finished.stdout
        for engine in ("pagemill", "transformers"):
            assert len(workload["engines"][engine]["tokens_per_second"]) == 2
        equal, total = workload["engines"]["pagemill"]["outputs_equal_to_transformers"]
        assert equal == total == workload["requests"]
