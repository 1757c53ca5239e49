"""Every benchmark can be imported, `benchmarks.all` runs only existing ones, and a page cites every result."""

from __future__ import annotations

import pkgutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import benchmarks
from benchmarks import all as everything
from benchmarks.report import RESULTS
from tests.conftest import ROOT

MOST_RESULTS = 12


def test_every_module_can_be_imported() -> None:
    names = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
    failures = {}
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            failures[name] = repr(error)
    assert "benchmarks.gpu.sections.decode" in names
    assert not failures


def test_every_command_of_the_list_is_there() -> None:
    for quick in (False, True):
        listed = everything.commands(quick)
        assert len(listed) == len(everything.COMMANDS)
        assert all(find_spec(module) for _, module, *_ in listed)
    assert set(everything.QUICK) <= {command[0] for command in everything.COMMANDS}


def test_the_page_cites_every_result_in_the_repository() -> None:
    listed = ["git", "ls-files", "--cached", str(RESULTS)]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    page = (ROOT / "docs" / "performance.md").read_text()
    assert files
    assert [file for file in files if Path(file).name not in page] == []
    assert len(files) <= MOST_RESULTS
