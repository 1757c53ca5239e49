"""The real model: all-MiniLM-L6-v2, which a package holds as a Sentence Transformers directory."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.find_spec("all_minilm_l6_v2")  # found and not imported: its import prints
    assert spec is not None
    assert spec.origin is not None
    directory = tmp_path_factory.mktemp("models") / "all-MiniLM-L6-v2"
    with zipfile.ZipFile(Path(spec.origin).parent / "model.zip") as archive:
        archive.extractall(directory)
    return directory
