"""A layer's kernels compiled by several processes: nothing is compiled twice, and nobody depends on it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")

import numba

from kernels import compile_ahead
from kernels.compile_ahead import Part, compile_apart
from kernels.compile_progress import report_compiling

PART = Part("project", is_int8=False, cache_dtype=torch.float32)


class Broken(Part):
    def command(self) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(1)", "broken"]

    def compile(self) -> None:
        pass


class Endless(Part):
    def command(self) -> list[str]:
        return [sys.executable, "-c", "import time; time.sleep(600)", "endless"]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "_num_cores", lambda: 2)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that are started."""
    started: list[subprocess.Popen[bytes]] = []
    start = compile_ahead._start

    def note(part: Part) -> subprocess.Popen[bytes]:
        started.append(start(part))
        return started[-1]

    monkeypatch.setattr(compile_ahead, "_start", note)
    return started


def wait_for(children: list[subprocess.Popen[bytes]], count: int) -> None:
    deadline = time.monotonic() + 120
    while len([child for child in children if child.poll() is not None]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_another_process_compiles_is_loaded(children, monkeypatch):
    """In the tests' own cache, so that the kernels are compiled once for all tests."""
    monkeypatch.setattr(compile_ahead, "_fingerprint", lambda parts: "test")
    marker = Path(numba.config.CACHE_DIR) / "compiled-test"
    marker.unlink(missing_ok=True)
    compile_apart([PART, PART], meanwhile=lambda: wait_for(children, 2))  # so that it takes both
    assert [child.returncode for child in children] == [0, 0]
    assert marker.exists()
    counts = []
    with report_compiling(lambda count, seconds: counts.append(count), every=0.0):
        PART.compile()
    assert not counts
    ran = []
    compile_apart([PART, PART], meanwhile=lambda: ran.append("here"))
    assert ran == ["here"]
    assert len(children) == 2, "compiled already"
    marker.unlink()


def test_a_process_that_fails_is_nobodys_harm(children, monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    broken = Broken(*PART)
    for runs in (1, 2):
        compile_apart([broken, broken], meanwhile=lambda runs=runs: wait_for(children, 2 * runs))
    assert [child.returncode for child in children] == [1] * 4, "not compiled yet, so tried again"


def test_parts_that_nobody_took_are_compiled_here(children, monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    taken = []
    monkeypatch.setattr(Endless, "compile", lambda part: (taken.append(part), children[0].kill()))
    endless = Endless(*PART)

    def wait_for_start() -> None:
        while not children:
            time.sleep(0.01)

    compile_apart([endless, endless], meanwhile=wait_for_start)
    assert taken == [endless]
    assert len(children) == 1


def test_one_core_or_no_place_to_keep_them_starts_nothing(children, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    ran = []
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "cache"))
    compile_apart([PART, PART], meanwhile=lambda: ran.append("here"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead, "_num_cores", lambda: 1)
    compile_apart([PART, PART], meanwhile=lambda: ran.append("here"))
    assert (children, ran) == ([], ["here"] * 2)


def test_processes_end_with_what_runs_meanwhile(children, monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def fail() -> None:
        while not children:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_apart([Endless(*PART)] * 3, meanwhile=fail)
    assert [child.wait(timeout=60) for child in children] == [-9]


def test_a_fingerprint_tells_parts_apart():
    prints = {
        compile_ahead._fingerprint([Part(name, is_int8, dtype)])
        for name in ("project", "finish")
        for is_int8 in (False, True)
        for dtype in (torch.float32, torch.int8)
    }
    assert len(prints) == 8
