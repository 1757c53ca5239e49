from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate cache for each test: the results of comparisons are stored there."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(directory))
    return directory
