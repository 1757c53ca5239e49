from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import all as everything
from benchmarks import startup
from benchmarks.engines.process import ROOT
from benchmarks.startup import parse_import_times, seconds_until_ready


def test_imports_are_listed_by_what_they_cost_with_all_they_bring() -> None:
    text = """import time: self [us] | cumulative | imported package
import time:       100 |      70000 |   torch.small
import time:    200000 |     900000 | torch
import time:        10 |         10 |     tiny
noise
"""
    assert parse_import_times(text, 0.05) == [("torch", 0.9), ("torch.small", 0.07)]


def test_a_start_is_over_when_the_engine_is_ready_not_when_its_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = tmp_path / "ended"
    program = f"print('ready', flush=True); input_ = open(0).read(); open({str(ended)!r}, 'w').close()"
    had_ended: list[bool] = []

    def clock() -> float:
        had_ended.append(ended.exists())
        return float(len(had_ended))

    monkeypatch.setattr(startup.time, "perf_counter", clock)
    assert seconds_until_ready([sys.executable, "-c", program]) == 1.0
    assert had_ended == [False, False]
    assert ended.exists(), "and yet it is waited for"


@pytest.mark.parametrize(
    "program", ["raise SystemExit('no model')", "print('ready'); raise SystemExit('no model')"]
)
def test_a_start_that_fails_is_no_figure(program: str) -> None:
    with pytest.raises(RuntimeError, match="no model"):
        seconds_until_ready([sys.executable, "-c", program])


@pytest.mark.parametrize("quick", [False, True])
def test_every_benchmark_of_the_list_is_there(quick: bool) -> None:
    listed = everything.commands(quick)
    assert len(listed) == len(everything.COMMANDS)
    for _, module, *_ in listed:
        assert importlib.util.find_spec(module) is not None
    assert set(everything.QUICK) <= {command[0] for command in everything.COMMANDS}


@pytest.mark.slow
def test_a_dry_run_measures_starts_and_first_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "startup.json"
    command = [
        sys.executable, "-m", "benchmarks.startup", "--model", str(tiny_llama), "--repeats", "1",
        "--prompt-tokens", "16", "--out", str(path),
    ]  # fmt: skip
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(path.read_text())
    assert report["ready_seconds"][0] > 0
    assert report["first_token"]["16"]["ratio"] > 0
    assert "first tokens differ" not in finished.stderr
