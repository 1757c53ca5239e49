"""GGUF files: a separate process creates one Hugging Face directory per file, which refers to its matrices."""

from __future__ import annotations

import importlib.util
import os
import struct
from pathlib import Path

from pagemill.engine.errors import ModelLoadError

SOURCE = ".source.gguf"
"""Name of the link to the file, in the directory created from it."""
# Part of the directory's name: a new conversion format must not find an older result.
_FORMAT_VERSION = 6
_HEADER = struct.Struct("<4sIQQ")
_SMALLEST_TENSOR = 24
"""Bytes of a tensor's entry with an empty name and one dimension: lengths, dimension, type and offset."""
_SMALLEST_FIELD = 13


def is_gguf(model: str) -> bool:
    """Return True if a model's name refers to a GGUF file."""
    return model.lower().endswith(".gguf")


def check_gguf(file: Path) -> None:
    """Raise `ModelLoadError` for a file without a plausible GGUF header. Does not import any modules."""
    if not file.is_file():
        raise ModelLoadError(f"no model at {str(file)!r}: the file does not exist")
    with file.open("rb") as opened:
        header = opened.read(_HEADER.size)
    size = file.stat().st_size
    if not header.startswith(b"GGUF"):
        raise ModelLoadError(f"{file} is not a GGUF file: it begins with other bytes; download it again")
    if len(header) < _HEADER.size:
        raise ModelLoadError(f"{file} ends within its header; download it again")
    _, version, num_tensors, num_fields = _HEADER.unpack(header)
    if version not in (2, 3):
        raise ModelLoadError(
            f"{file} has version {version} of GGUF; 2 and 3 are supported, in little-endian order"
        )
    if num_tensors * _SMALLEST_TENSOR + num_fields * _SMALLEST_FIELD > size:
        raise ModelLoadError(
            f"{file} is damaged: {num_tensors} tensors and {num_fields} fields cannot be in {size} bytes; "
            "download it again"
        )


def gguf_directory(file: Path) -> Path:
    """Return a directory of the file's model; create it on first use.

    It contains the configuration, the tokenizer and the tensors that must be changed; the matrices remain in the file.

    Raises:
        ModelLoadError: the file is damaged, or of an unsupported architecture or tensor type.
        EngineError: the directory is not writable.
    """
    # Not at module level: commands of a light install also search for models.
    from pagemill.engine.models.formats.cache import cached_conversion, identity, not_kept
    from pagemill.engine.models.formats.process import convert

    check_gguf(file)
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ModelLoadError(f"reading {file} needs the package {needed}: pip install 'pagemill[gguf]'")
    name = f"{_plain(file.stem)}-{identity([file])}-v{_FORMAT_VERSION}"
    directory = cached_conversion(name, str(file), lambda work: convert("gguf", [file], work))
    try:
        _link_source(directory, file)
    except OSError as error:
        raise not_kept(str(file), directory, error) from error
    return directory


def _link_source(directory: Path, file: Path) -> None:
    """Make the directory created from a file's contents refer to this path of it. Raises `OSError`."""
    link, target = directory / SOURCE, file.resolve()
    if link.is_symlink() and link.readlink() == target:
        return
    temporary = directory / f"{SOURCE}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)


def _plain(stem: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in stem).lstrip(".")[:100] or "model"
