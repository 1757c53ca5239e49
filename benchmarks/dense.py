"""Copies of GGUF models in fp32, for engines that read neither GGUF files nor Pagemill's directories of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pagemill.engine.models.checkpoint import read_config, read_dense
from pagemill.engine.models.formats.cache import cached_conversion
from pagemill.engine.models.formats.gguf import SOURCE
from pagemill.engine.models.formats.shards import ShardWriter
from pagemill.engine.models.packaged import packaged_model_directory


def dense_directory(directory: Path) -> Path:
    """Return a copy of a GGUF file's directory with all tensors in fp32, created once; other directories unchanged."""
    if not (directory / SOURCE).is_symlink():
        return directory
    return cached_conversion(f"dense-{directory.name}", str(directory), lambda work: _write(directory, work))


def dense_smollm2() -> Path:
    """Return the packaged model's copy."""
    return dense_directory(packaged_model_directory())


def _write(directory: Path, work: Path) -> None:
    for file in directory.iterdir():
        if file.is_file() and file.name != SOURCE and ".safetensors" not in file.name:
            shutil.copy(file, work)
    (work / "config.json").write_text(json.dumps(read_config(directory)))
    writer = ShardWriter(work)
    for name, tensor in read_dense(directory).items():
        writer.add(name, tensor)
    writer.close()
