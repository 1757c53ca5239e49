"""Artifacts built from the sources, once for all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of git's tracked files, so that leftovers of an earlier build are excluded."""
    directory = tmp_path_factory.mktemp("source")
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", directory], input=archive, check=True)
    return directory


@pytest.fixture(scope="session")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the build backend's own hook, as `python -m build --sdist` calls it."""
    directory = tmp_path_factory.mktemp("sdist")
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(directory)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=source, capture_output=True, check=True)
    return next(directory.glob("*.tar.gz"))


def built(source: Path, directory: Path) -> Path:
    """The wheel of a directory or an sdist."""
    command = [
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", directory,
        source,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(source, tmp_path_factory.mktemp("wheel"))
