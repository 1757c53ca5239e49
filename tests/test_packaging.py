"""What `pip install` brings: every package in the wheel, and a light install that works without the rest."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PARTS = ("producer", "engine", "kernels", "worker", "monitoring")


def test_every_package_is_named() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for part in PARTS
        for path in (ROOT / part).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_extras_name_each_other_rightly() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for requirements in extras.values():
        for requirement in requirements:
            if requirement.startswith("pagemill["):
                named = requirement.removeprefix("pagemill[").partition("]")[0].split(",")
                assert set(named) <= extras.keys(), requirement


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git tracks, so that nothing left behind by an earlier build gets in."""
    directory = tmp_path_factory.mktemp("wheel")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    (directory / "source").mkdir()
    subprocess.run(["tar", "-x", "-C", directory / "source"], input=archive, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", directory, directory / "source"]
    subprocess.run(command, check=True)
    return next(directory.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_its_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True)
    apart = ("monitoring/grafana/", "monitoring/prometheus/")
    assert {name for name in listed.stdout.split() if not name.startswith(apart)} <= names


@pytest.mark.slow
def test_a_light_install_has_its_commands_and_says_what_is_missing_for_the_others(
    wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    subprocess.run([binaries / "pip", "install", "-q", wheel], check=True)
    installed = subprocess.run([binaries / "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "torch" not in installed
    assert "celery" not in installed

    def pagemill(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [binaries / "pagemill", *arguments], cwd=tmp_path, capture_output=True, text=True
        )

    assert "submit" in pagemill("--help").stdout
    worker = pagemill("worker", "--model", "echo")
    assert worker.returncode == 2
    assert "pagemill[worker]" in worker.stderr
    celery = pagemill("celery-worker", "--model", "echo")
    assert celery.returncode == 2
    assert "pagemill[celery]" in celery.stderr
