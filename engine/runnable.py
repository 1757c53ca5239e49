"""Checks if a model can be run, from its config.json and the names of its files: no tensor is read."""

from __future__ import annotations

from pathlib import Path

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.checkpoint import read_config, read_scheme, weight_files
from pagemill.engine.models.families.registry import find_family
from pagemill.engine.pooling.folder import read_pooling_folder


def check_config(directory: Path) -> None:
    """Raise `ModelLoadError` if config.json names a model that a start would refuse."""
    if read_pooling_folder(directory) is not None:
        return
    raw = read_config(directory)
    read_scheme(directory)
    family = find_family(raw)
    try:
        family.build_config(raw)
    except ModelLoadError:
        raise
    except Exception as error:  # the file can make transformers' validation raise anything
        message = " ".join(str(error).split())  # some have several lines
        raise ModelLoadError(f"can't read {directory / 'config.json'}: {message}") from error


def why_not(directory: Path) -> str | None:
    """Return why the model in a directory can't be run; None if nothing is known against it."""
    try:
        check_config(directory)
        weight_files(directory)
    except ModelLoadError as error:
        return str(error)
    return None
