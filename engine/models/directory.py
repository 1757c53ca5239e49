"""Resolves a model's name to its directory. Imports no torch, so that a wrong name fails at once."""

from __future__ import annotations

from pathlib import Path

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.echo import echo_step_seconds, is_echo
from pagemill.engine.models.packaged import PACKAGED_MODEL, find_gguf, packaged_model_directory


def model_directory(model: str) -> Path:
    """Return the directory of a model given by path or by packaged name. Raises `ModelLoadError`."""
    if model == PACKAGED_MODEL:
        return packaged_model_directory()
    directory = Path(model).expanduser()
    if not directory.is_dir():
        raise ModelLoadError(
            f"no model at {model!r}: give a Hugging Face model directory, {PACKAGED_MODEL!r} or 'echo'"
        )
    if not any((directory / name).is_file() for name in ("config.json", "modules.json")):
        raise ModelLoadError(f"{directory} is no model directory: it has no config.json")
    return directory


def check_model(model: str) -> None:
    """Raise `ConfigError` if there is no such model. Loads and converts nothing."""
    if is_echo(model):
        echo_step_seconds(model)
    elif model == PACKAGED_MODEL:
        find_gguf()
    else:
        model_directory(model)
