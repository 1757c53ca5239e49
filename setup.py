"""Refuses to build from a tree without its symbolic links; the build itself is described in pyproject.toml."""

from pathlib import Path

from setuptools import setup

if not Path("pagemill/engine/__init__.py").is_file():
    raise SystemExit(
        "pagemill/engine does not lead to engine/: this copy of the sources has lost its symbolic links, and the "
        "wheel would be empty. Build from a git checkout, or from the sdist."
    )
setup()
