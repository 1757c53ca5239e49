"""Pickled weights (`pytorch_model.bin`, one or many): converted once to safetensors, in a separate process."""

from __future__ import annotations

import re
from pathlib import Path

from pagemill.engine.models.formats.cache import cached_conversion, identity
from pagemill.engine.models.formats.process import convert

_FORMAT_VERSION = 1
# Other pickles are stored next to weights: an optimizer's state, a trainer's arguments, adapters.
_WEIGHTS = re.compile(r"^(pytorch_)?model.*\.bin$")

PICKLED_WHOLE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"


def find_pickles(directory: Path) -> list[Path]:
    """Return the pickled weights of a directory without an index; empty if there are none."""
    if (directory / PICKLED_WHOLE).is_file():
        return [directory / PICKLED_WHOLE]
    return [file for file in sorted(directory.glob("*.bin")) if _WEIGHTS.match(file.name)]


def converted_pickles(files: list[Path]) -> list[Path]:
    """Return cached safetensors files with the tensors of `files`; convert them on first use.

    Raises:
        ModelLoadError: a file is damaged, does not contain tensors, or requests code execution. No code is run.
        EngineError: the result cannot be stored.
    """
    name = f"{files[0].absolute().parent.name[:100]}-bin-{identity(files)}-v{_FORMAT_VERSION}"
    directory = cached_conversion(name, str(files[0].parent), lambda work: convert("pickle", files, work))
    return sorted(directory.glob("*.safetensors"))
