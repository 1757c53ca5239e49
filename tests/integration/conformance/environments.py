"""Environments with third-party packages, kept in pytest's cache; only the package registries are contacted."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

_INSTALL_S = 900


def python_with(config: pytest.Config, *requirements: str) -> Path:
    """Return the interpreter of a virtual environment with these packages. Skips the test if pip cannot get them."""
    folder = _folder(config, "python", requirements)
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        _install([str(python), "-m", "pip", "install", "-q", *requirements], folder)
    return python


def node_modules_with(config: pytest.Config, *packages: str) -> Path:
    """Return a folder with these packages of npm. Skips the test without npm, or if it cannot get them."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node")
    folder = _folder(config, "node", packages)
    if not (folder / "complete").exists():
        command = [
            "npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", "--prefix", str(folder),
        ]  # fmt: skip
        _install([*command, *packages], folder)
    return folder


def outside() -> dict[str, str]:
    """Return this process's environment without the variables of Python's modules and Pagemill."""
    return {
        name: v for name, v in os.environ.items() if not name.startswith(("PAGEMILL_", "PYTHON", "OPENAI_"))
    }


def _folder(config: pytest.Config, kind: str, packages: Sequence[str]) -> Path:
    digest = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    assert config.cache is not None
    return config.cache.mkdir("conformance") / f"{kind}-{digest}"


def _install(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, env=outside(), capture_output=True, text=True, timeout=_INSTALL_S, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        pytest.skip(f"{command[2]} cannot install its packages: {lines[-1] if lines else command}")
    (folder / "complete").touch()
