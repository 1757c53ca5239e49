"""The fixtures in a separate project, as its pytest sees them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT, run_python

MODULE = "service"
SERVICE = """
from pagemill import Producer

def label(text):
    with Producer() as producer:
        job = producer.submit(
            prompt=text, model="smollm2", structured_outputs={"choice": ["good", "bad"]}
        )
        return job.result(timeout=60).text
"""
TESTS = """
from service import label

def test_a_reply(pagemill_worker):
    pagemill_worker.reply(lambda prompt: "good" if "love" in prompt else "bad")
    assert label("I love it") == "good"
    assert label("I do not") == "bad"

def test_a_queue_without_a_worker(pagemill_queue):
    with pagemill_queue.producer() as producer:
        assert producer.submit(prompt="x", model="smollm2").status().state == "queued"
"""


# The installed package's entry point already names it; a source tree without an installation does not have one.
NAMED = () if any(entry_points(group="pytest11", name="pagemill")) else ("-p", "pagemill.testing.plugin")


@pytest.mark.slow
def test_a_service_is_tested_without_a_server(tmp_path: Path) -> None:
    (tmp_path / f"{MODULE}.py").write_text(SERVICE)
    (tmp_path / f"test_{MODULE}.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\npagemill_model = smollm2\npythonpath = .\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *NAMED,
        "-p",
        "no:cacheprovider",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_pytest_finds_it_by_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"pagemill": "pagemill.testing.plugin"}


ONLY_BASE = """
import sys

for name in {blocked!r}:
    sys.modules[name] = None
import pagemill.producer
import pagemill.testing.plugin
"""


def test_a_base_install_can_import_the_plugin(tmp_path: Path) -> None:
    """Pytest imports it in every environment with pagemill, also without any extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = _closure({_name(requirement) for requirement in project["dependencies"]} | {"pytest"})
    blocked = sorted(
        module
        for module, owners in packages_distributions().items()
        if module.isidentifier()
        and not base & {canonicalize_name(owner) for owner in owners}
        and module != "pagemill"
    )
    assert {"prometheus_client", "tokenizers", "torch", "transformers"} <= {*blocked}
    done = run_python(
        "-c",
        ONLY_BASE.format(blocked=blocked),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def _closure(names: set[str]) -> set[str]:
    """Return the packages with all of their requirements."""
    found: set[str] = set()
    while names:
        found |= names
        requirements: set[str] = set()
        for name in names:
            with suppress(PackageNotFoundError):
                requirements |= {_name(text) for text in requires(name) or [] if "extra ==" not in text}
        names = requirements - found
    return found
