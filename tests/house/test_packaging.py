"""The result of `pip install`: the contents of the wheel and of the sdist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_python
from tests.house.conftest import built

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PARTS = ("producer", "engine", "kernels", "worker", "monitoring")
BESIDE = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py", "MANIFEST.in"}
"""Files of an sdist besides the package."""


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
    for part in PARTS:  # unpacked on a system without symbolic links
        (tmp_path / "copy/pagemill" / part).unlink()
        (tmp_path / "copy/pagemill" / part).write_text(f"../{part}")
    script = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    run = run_python("-c", script, cwd=tmp_path / "copy")
    assert run.returncode != 0
    assert "has lost its symbolic links" in run.stderr
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.slow
def test_an_index_would_accept_both(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    """Twine is not one of the development tools: it installs a keyring and 20 other packages."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), "twine>=6"]
    if subprocess.run(pip, check=False).returncode:
        pytest.skip("twine cannot be installed: no package index")
    checked = run_python(
        "-m",
        "twine",
        "check",
        "--strict",
        str(sdist),
        str(wheel),
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("PASSED") == 2
