"""What `pip install` brings: every package in the wheel, and a light install that works without the rest."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PARTS = ("producer", "engine", "kernels", "worker", "monitoring")


def test_extras_name_each_other_rightly() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for requirements in extras.values():
        for requirement in requirements:
            if requirement.startswith("pagemill["):
                named = requirement.removeprefix("pagemill[").partition("]")[0].split(",")
                assert set(named) <= extras.keys(), requirement


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks, so that nothing left behind by an earlier build gets in."""
    directory = tmp_path_factory.mktemp("source")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", directory], input=archive, check=True)
    return directory


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the build backend's own hook, as `python -m build --sdist` calls it."""
    directory = tmp_path_factory.mktemp("sdist")
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(directory)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, check=True)
    return next(directory.glob("*.tar.gz"))


def built(source: Path, directory: Path) -> Path:
    """The wheel of a directory or an sdist."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", directory, source]
    subprocess.run(command, check=True)
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(source, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_its_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD", *PARTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    apart = ("monitoring/grafana/", "monitoring/prometheus/")
    assert {name for name in listed.stdout.split() if not name.startswith(apart)} <= names


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    from_sdist = built(sdist, tmp_path)
    assert zipfile.ZipFile(from_sdist).namelist() == zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_light_install_has_its_commands_and_says_what_is_missing_for_the_others(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env" / "bin"
    package: Path = request.getfixturevalue(kind)
    subprocess.run([binaries / "pip", "install", "-q", package], check=True)
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
