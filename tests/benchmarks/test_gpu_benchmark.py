from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import correctness
from benchmarks.gpu import run as gpu
from benchmarks.gpu.attention import Shape
from benchmarks.gpu.correctness import Job, run_jobs
from benchmarks.gpu.engine import Job as EngineJob
from benchmarks.gpu.engine import floor_seconds, run_in_process
from benchmarks.gpu.process import DeviceProcess, SectionFailed
from benchmarks.gpu.run import SECTIONS, Section, Session
from pagemill.kernels.gpu.tuning import Tile
from tests.conftest import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so_and_leaves(tmp_path: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--section",
            "machine",
            "--out",
            str(tmp_path / "out"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "no CUDA device" in run.stderr
    assert not (tmp_path / "out").exists()


def _dry_run(out: Path, *arguments: str) -> dict[str, list[dict[str, object]]]:
    """The report of a walk over toy sizes, in the interpreter and on the CPU."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--device",
        "cpu",
        "--dry-run",
        "--out",
        str(out),
    ]
    run = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
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
    sections = [name for name in SECTIONS if not name.startswith(("engine", "peer", "switches", "ranks"))]
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
    assert found["ranks"][0]["ok"]
    assert found["engine llama-3.1-8b"][0]["output_tokens"]
    assert found["peer qwen3-0.6b"][0]["ended"] == 3
    assert "pagemill_over_it" in found["peer qwen3-0.6b"][0]


@pytest.mark.slow
def test_a_section_that_does_not_fit_is_left_out(tmp_path: Path) -> None:
    found = _dry_run(tmp_path, "--budget", "20", "--section", "machine", "--section", "decode")
    assert found["machine"][0]["fact"] == "python"
    assert "left_out" in found["decode"][0]


@pytest.mark.parametrize("greedy", [set(SECTIONS), {"switches"}, set()], ids=["all", "one", "none"])
def test_sections_that_take_all_they_may_end_in_time(
    greedy: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only sections move."""
    now = 0.0
    took: dict[str, float] = {}

    def made_up(name: str, section: Section) -> Section:
        def run(session: Session) -> Iterator[dict[str, Any]]:
            nonlocal now
            limit = min(section.limit_seconds or 1e9, session.seconds_left)
            took[name] = limit if name in greedy else min(1.0, limit)
            now += took[name]
            yield {"section": name}

        return replace(section, run=run, limit_seconds=None)

    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(gpu, "SECTIONS", {name: made_up(name, section) for name, section in SECTIONS.items()})
    session, device, names = (
        Session(torch.device("cpu"), False, 560.0, tmp_path),
        DeviceProcess(),
        list(SECTIONS),
    )
    for number, name in enumerate(names):
        gpu._run_section(name, names[number + 1 :], session, device)
        gpu._save(session)
    assert now <= 560.0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert list(found) == names
    assert all(found.values())
    assert took["correctness"] == (180.0 if "correctness" in greedy else 1.0)
    if greedy == {"switches"}:
        assert set(took) == set(names), "it costs no other its place"
    assert {"decode", "prefill", "rows"} <= set(took)
    assert all(took[name] >= SECTIONS[name].needs_seconds for name in took if name in greedy)


def _section(ending: str) -> Iterator[dict[str, Any]]:
    yield {"process": os.getpid()}
    if ending == "raises":
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")
    if ending == "dies":
        os._exit(3)
    if ending == "hangs":
        time.sleep(3600)


@pytest.mark.slow
def test_a_section_that_fails_keeps_its_rows_and_costs_the_next_one_nothing() -> None:
    device = DeviceProcess()
    try:
        processes = [row["process"] for _ in range(2) for row in device.rows(_section, "ends", 300.0)]
        assert processes[0] == processes[1] != os.getpid()
        for ending, why in (("raises", "illegal memory access"), ("dies", "has ended"), ("ends", "")):
            rows = device.rows(_section, ending, 300.0)
            processes.append(next(rows)["process"])
            if why:
                with pytest.raises(SectionFailed, match=why):
                    next(rows)
            else:
                assert list(rows) == []
        assert len(set(processes)) == 3, "a process that a section has failed in is not used again"
        with pytest.raises(SectionFailed, match="not done after 1 s"):
            list(device.rows(_section, "hangs", 1.0))
        with pytest.raises(ProcessLookupError):
            os.kill(processes[-1], 0)
    finally:
        device.stop()


def test_a_case_that_fails_has_a_row_and_the_others_keep_theirs() -> None:
    jobs = [Job(ending, _section, (ending,)) for ending in ("ends", "raises", "dies", "ends")]
    rows = list(run_jobs(jobs, 1))
    failed = {row["case"]: row["why"] for row in rows if row.get("ok") is False}
    assert set(failed) == {"raises", "dies"}
    assert "illegal memory access" in failed["raises"]
    assert sum("process" in row for row in rows) == 2


def test_a_gpu_machine_needs_no_more_than_torch_and_transformers() -> None:
    """Nothing can be installed where a GPU is lent: what only producers and structured outputs use stays unloaded."""
    code = (
        "import sys\n"
        "for name in ('llguidance', 'pydantic', 'redis'): sys.modules[name] = None\n"
        "import benchmarks.gpu.run, pagemill.engine.llm, pagemill.engine.builder\n"
        "import pagemill.engine.execution.model_runner\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_jobs_that_only_a_gpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach their processes, and ask the sections for what these take; nothing is launched."""
    cpu = torch.device("cpu")
    jobs = [*correctness._checks(cpu), *correctness._compilations(cpu)]
    assert pickle.loads(pickle.dumps(jobs)) == jobs
    launches: list[object] = []

    def note(run: object) -> float:
        launches.append(run)
        return 1.0

    monkeypatch.setattr(correctness, "_once", note)
    toy = Shape("toy", 2, 1, 64)
    correctness._compile_decode(cpu, toy, 16)
    correctness._compile_prefill(cpu, toy)
    correctness._compile_tiles(cpu, [Tile(16, 64, 4, 2)], [Tile(128, 64, 8, 3)])
    assert len(launches) == 2 + 1 + 3
    correctness._compile_rows(cpu)
    assert len(launches) > 10


def test_an_engine_that_fails_leaves_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    row = run_in_process(EngineJob("tiny", "no such engine", "cpu"), 300.0, log)
    assert "KeyError" in row["error"]
    assert "Traceback" in log.read_text()


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
