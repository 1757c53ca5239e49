"""Converts pickled tensors to safetensors; runs only in the converting process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.formats.shards import ShardWriter

_ZIP = b"PK\x03\x04"
_MOST_EXPANSION = 2
"""Tensors can share memory (a tied head), but not so often that the files would fill the disk."""
_REFUSED_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_UNPICKLER = "WeightsUnpickler error:"


def convert_pickles(files: list[Path], directory: Path) -> None:
    """Write the tensors of all files into `directory`, with their names and dtypes.

    torch's restricted unpickler builds tensors and plain containers, and raises at any other global.

    Raises:
        ModelLoadError: a file is damaged, hostile, or not a mapping of names to tensors.
    """
    writer = ShardWriter(directory)
    budget = _MOST_EXPANSION * sum(file.stat().st_size for file in files)
    for file in files:
        for name, tensor in _tensors(file).items():
            if name in writer:
                raise ModelLoadError(f"{file.name}: another file has the tensor {name!r} too")
            budget -= tensor.numel() * tensor.element_size()
            if budget < 0:
                raise ModelLoadError(f"{file.name}: its tensors are larger than the file; it may be hostile")
            writer.add(name, tensor)
        writer.flush()  # so that one file is open at a time
    writer.close()


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    with file.open("rb") as opened:
        is_zip = opened.read(len(_ZIP)) == _ZIP
    try:
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except MemoryError:
        raise
    except Exception as error:  # the file can make it raise anything
        if "alloc" in str(error):
            raise
        raise ModelLoadError(f"{file.name} {_complaint(str(error) or type(error).__name__)}") from error
    if not isinstance(content, dict) or not content:
        raise ModelLoadError(f"{file.name} holds no tensors by name; give a checkpoint of weights alone")
    for name, tensor in content.items():
        is_plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if not isinstance(name, str) or not is_plain or tensor.is_quantized or tensor.is_meta:
            raise ModelLoadError(
                f"{file.name}: {name!r} is not a plain tensor; use a checkpoint of weights alone"[:400]
            )
    return content


def _complaint(message: str) -> str:
    """Explain torch's message, which mostly describes how to load the file anyway."""
    if asked := _REFUSED_GLOBAL.search(message):
        return f"asks for {asked[1]}, which weights don't need; it may be hostile, and nothing of it was run"
    reason = message.partition(_UNPICKLER)[2].strip() or message.strip()
    return f"is damaged ({reason.splitlines()[0].split('. ')[0][:200]}); download it again"
