"""Finds an adapter's folder."""

from __future__ import annotations

from pathlib import Path

from pagemill.engine.errors import AdapterError


def obtain_adapter(source: str) -> Path:
    """Return the folder of an adapter. Raises `AdapterError`."""
    directory = Path(source).expanduser()
    if not directory.is_dir():
        raise AdapterError(f"there is no folder {source[:200]!r}")
    return directory
