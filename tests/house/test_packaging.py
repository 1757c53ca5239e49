"""The result of `pip install`: every package in the wheel, and a light install that works without the rest."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.house.conftest import built

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PARTS = ("producer", "engine", "kernels", "worker", "monitoring")
BESIDE = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py", "MANIFEST.in"}
"""Files of an sdist beside the package."""


def test_extras_name_each_other_rightly() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for requirements in extras.values():
        for requirement in requirements:
            if requirement.startswith("pagemill["):
                named = requirement.removeprefix("pagemill[").partition("]")[0].split(",")
                assert set(named) <= extras.keys(), requirement


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", "HEAD", "pagemill", *PARTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    files = {name if name.startswith("pagemill/") else f"pagemill/{name}" for name in listed}
    links = {f"pagemill/{part}" for part in PARTS}
    apart = ("pagemill/monitoring/grafana/", "pagemill/monitoring/prometheus/")
    assert {name for name in files - links if not name.startswith(apart)} <= names <= files


@pytest.mark.slow
def test_the_sdist_holds_real_files_and_builds_the_same_wheel(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    from_sdist = built(sdist, tmp_path)
    assert zipfile.ZipFile(from_sdist).namelist() == zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        assert not any(member.issym() or member.islnk() for member in archive.getmembers())
        names = {name.partition("/")[2] for name in archive.getnames()} - {""}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert {name.partition("/")[0] for name in names} - BESIDE == {"pagemill", "pagemill.egg-info"}


@pytest.mark.slow
def test_a_copy_without_its_links_does_not_build(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "copy", symlinks=True)
    for part in PARTS:  # as an archive unpacks them where there are no symbolic links
        (tmp_path / "copy/pagemill" / part).unlink()
        (tmp_path / "copy/pagemill" / part).write_text(f"../{part}")
    script = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "copy", capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "has lost its symbolic links" in run.stderr
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.slow)])
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
