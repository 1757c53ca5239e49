from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import startup
from benchmarks.startup import seconds_until_ready
from tests.benchmarks.dry_run import dry_run


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


@pytest.mark.slow
def test_a_dry_run_measures_starts_and_first_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    words = ("--model", str(tiny_llama), "--repeats", "1", "--prompt-tokens", "16")
    report, finished = dry_run("benchmarks.startup", tmp_path / "startup.json", *words)
    assert report["ready_seconds"][0] > 0
    assert report["first_token"]["16"]["ratio"] > 0
    assert "first tokens differ" not in finished.stderr
