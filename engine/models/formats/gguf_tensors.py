"""The tensors of a GGUF file, mapped into memory; the directory created from it has their positions.

Its config.json has, as `quantization_config`, `{"quant_method": "gguf", "tensors": {NAME: ENTRY}, "orders": [ORDER]}`.
NAME is transformers' name, with `*` for the index of an expert. An order is a permutation of a tensor's rows.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.json_files import read_json_object

METHOD = "gguf"
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types with a torch dtype."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The location of a matrix, or of one per expert."""

    type: str
    """ggml's name of its type."""
    offset: int
    """In bytes, from the start of the file."""
    rows: int
    columns: int
    row_bytes: int
    experts: int = 0
    """0: it is not one of experts."""
    order: int | None = None
    """The index of the order that makes its rows the model's; None: they are in order."""

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Contents:
    """The entries of a file by name, and the orders that they refer to."""

    entries: Mapping[str, Entry]
    orders: tuple[tuple[int, ...], ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Contents:
        """Read a `quantization_config`. Raises `ModelLoadError`."""
        try:
            entries = {name: Entry(**entry) for name, entry in config["tensors"].items()}
            return cls(entries, tuple(map(tuple, config["orders"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"can't read quantization_config of a GGUF file: {error!r}") from error

    def matrices(self) -> Iterator[tuple[str, Entry, int]]:
        """Yield the name of each matrix, its entry, and its start in the file."""
        for name, entry in self.entries.items():
            for expert in range(max(1, entry.experts)):
                offset = entry.offset + expert * entry.rows * entry.row_bytes
                yield (name.replace("*", str(expert)) if entry.experts else name), entry, offset

    def json(self) -> dict[str, Any]:
        entries = {name: entry.json() for name, entry in self.entries.items()}
        return {"quant_method": METHOD, "tensors": entries, "orders": list(map(list, self.orders))}


def read_contents(file: Path) -> Contents:
    """Return the facts about the file in the directory with this link. Raises `ModelLoadError` if the file differs."""
    quantization = read_json_object(file.with_name("config.json")).get("quantization_config")
    contents = Contents.from_config(quantization if isinstance(quantization, dict) else {})
    try:
        size = file.stat().st_size
    except OSError as error:
        raise ModelLoadError(
            f"can't read {file.readlink()}: {error.strerror}; give the path of the file"
        ) from error
    end = max(
        (e.offset + max(1, e.experts) * e.rows * e.row_bytes for e in contents.entries.values()), default=0
    )
    if end > size:
        raise ModelLoadError(
            f"{file.resolve()} has {size} bytes, its tensors end at {end}: download it again"
        )
    return contents


def map_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the matrices by name: values [rows, columns] of a type in FLOATS, other blocks as uint8 [rows, bytes].

    Raises:
        ModelLoadError: the file does not exist, or its size differs from the directory's record.
    """
    contents = read_contents(file)
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these tensors are never written
        content = torch.frombuffer(mapped, dtype=torch.uint8)
    tensors = {}
    for name, entry, offset in contents.matrices():
        matrix = content[offset : offset + entry.rows * entry.row_bytes].view(entry.rows, entry.row_bytes)
        tensors[name] = _floats(matrix, entry, contents) if entry.type in FLOATS else matrix
    return tensors


def _floats(matrix: torch.Tensor, entry: Entry, contents: Contents) -> torch.Tensor:
    dtype = FLOATS[entry.type]
    if matrix.storage_offset() % dtype.itemsize:
        matrix = matrix.clone()
    numbers = matrix.view(dtype)
    return numbers if entry.order is None else numbers[torch.tensor(contents.orders[entry.order])]
