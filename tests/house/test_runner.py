"""The test runner: failures are rerun alone, and every test belongs to one part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests import run
from tests.conftest import ROOT

FLAKY = """
from pathlib import Path

def test_flaky():
    marker = Path(__file__).with_name("seen")
    first = not marker.exists()
    marker.touch()
    assert not first, "the first time only"

def test_good():
    pass
"""
BROKEN = """
def test_broken():
    assert 1 == 2
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with separate tests, and with our plugin; `run.ROOT` points there."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/failures.py").write_text((ROOT / "tests/failures.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = slow: left out\n")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return tmp_path


class FakePytest:
    """`run._pytest` with a result for each call; keeps the arguments."""

    def __init__(self, *results: tuple[int, list[str]]) -> None:
        self.results = list(results)
        self.calls: list[Sequence[str]] = []

    def __call__(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[int, dict[str, str]]:
        self.calls.append(arguments)
        code, failed = self.results.pop(0)
        return code, {test: f"the traceback of {test}" for test in failed}


@pytest.mark.parametrize(
    ("results", "code", "failed", "flaky"),
    [
        ([(0, [])], 0, [], []),
        ([(1, ["a"]), (0, [])], 0, [], ["a"]),
        ([(1, ["a"]), (1, ["a"]), (0, [])], 0, [], ["a"]),
        ([(1, ["a"]), (1, ["a"]), (1, ["a"])], 1, ["a"], []),
        ([(1, ["a"]), (1, ["a"]), (5, [])], 1, ["a"], []),  # it exists only together with others
        ([(1, ["a", "b"]), (1, ["a"]), (1, ["a"]), (0, [])], 1, ["a"], ["b"]),
        ([(1, [])], 1, [], []),
        ([(2, ["tests/test_unreadable.py"])], 2, ["tests/test_unreadable.py"], []),
        ([(5, [])], 5, [], []),
        ([(-9, [])], -9, [], []),
    ],
)
def test_failures_run_again_alone(
    results: list[tuple[int, list[str]]],
    code: int,
    failed: list[str],
    flaky: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakePytest(*results)
    monkeypatch.setattr(run, "_pytest", fake)
    outcome = run.run("quick", [], processes=1)
    assert (outcome.code, outcome.failed, outcome.flaky) == (code, failed, flaky)
    assert not fake.results
    printed = capsys.readouterr().out
    assert all(f"FLAKY {test}" in printed and f"the traceback of {test}" in printed for test in flaky)


def test_many_failures_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"test_{i}" for i in range(run.MAX_RETRIED + 1)]
    monkeypatch.setattr(run, "_pytest", FakePytest((1, many)))
    outcome = run.run("quick", [], processes=1)
    assert (outcome.code, outcome.failed) == (run.TESTS_FAILED, many)


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((1, 0), 1), ((0, -9), 1)])
def test_one_bad_part_fails_the_whole(
    codes: tuple[int, int], expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_pytest", FakePytest(*((code, []) for code in codes)))
    assert run.main(["--all", "--part", "chaos", "--part", "engine"]) == expected
    printed = capsys.readouterr().out
    assert re.search(r"chaos +(passed|FAILED)", printed)
    assert re.search(r"engine +(passed|FAILED)", printed)


@pytest.mark.slow
def test_real_runs(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "tests/test_it.py").write_text(FLAKY + BROKEN)
    outcome = run.run("quick", ["-m", run.QUICK], processes=1)
    assert outcome.code == run.TESTS_FAILED
    assert outcome.failed == ["tests/test_it.py::test_broken"]
    assert outcome.flaky == ["tests/test_it.py::test_flaky"]
    printed = capfd.readouterr().out
    assert "the first time only" in printed.split("FLAKY")[1]
    assert printed.count("again, alone") == 1 + run.ATTEMPTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "import nothing_of_that_name", "raise SystemExit(0)", "x =", "import os\ndef test_it(): os._exit(0)",
        "",
    ],
)  # fmt: skip
def test_what_cannot_run_fails_the_run(project: Path, source: str) -> None:
    (project / "tests/test_it.py").write_text(source)
    assert run.run("quick", ["-m", run.QUICK], processes=1).code != 0


def test_every_test_file_belongs_to_one_part() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    found = [file for part in run.PARTS for file in _files(part, files)]
    assert sorted(found) == sorted(files)
    assert all((ROOT / path).is_dir() for paths in run.PARTS.values() for path in paths)


def _files(part: str, files: set[str]) -> list[str]:
    """Select tests like pytest, by the arguments of a part."""
    arguments = run.paths_of(part)
    ignored = [each.removeprefix("--ignore=") for each in arguments if each.startswith("--ignore=")]
    paths = [each for each in arguments if not each.startswith("--ignore=")]

    def below(file: str, folders: list[str]) -> bool:
        return any(file.startswith(f"{folder}/") for folder in folders)

    return [file for file in files if below(file, paths) and not below(file, ignored)]
