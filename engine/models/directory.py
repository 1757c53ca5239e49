"""Resolves a model's name to its directory. Imports no torch, so that a wrong name fails at once."""

from __future__ import annotations

from pathlib import Path

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.echo import echo_step_seconds, is_echo
from pagemill.engine.models.formats.gguf import check_gguf, gguf_directory, is_gguf
from pagemill.engine.models.misplaced import why_no_model
from pagemill.engine.models.packaged import PACKAGED_MODEL, find_gguf, packaged_model_directory


def model_directory(model: str) -> Path:
    """Return the directory of a model given by path, as a GGUF file or by packaged name. Raises `ModelLoadError`."""
    if model == PACKAGED_MODEL:
        return packaged_model_directory()
    directory = Path(model).expanduser()
    if is_gguf(model) and not directory.is_dir():
        return gguf_directory(directory)
    if not directory.is_dir():
        raise ModelLoadError(
            f"no model at {model!r}: give a Hugging Face model directory, a .gguf file, {PACKAGED_MODEL!r} or 'echo'"
        )
    if not (directory / "config.json").is_file():
        raise ModelLoadError(why_no_model(directory))
    return directory


def served_name(model: str) -> str:
    """Return the name that a model given so is known by."""
    if model == PACKAGED_MODEL:
        return model
    path = Path(model).expanduser()
    return path.stem if is_gguf(model) and not path.is_dir() else path.resolve().name


def check_model(model: str) -> None:
    """Raise `ConfigError` if there is no such model. Loads and converts nothing."""
    if is_echo(model):
        echo_step_seconds(model)
    elif model == PACKAGED_MODEL:
        find_gguf()
    elif is_gguf(model) and not Path(model).expanduser().is_dir():
        check_gguf(Path(model).expanduser())
    else:
        model_directory(model)
