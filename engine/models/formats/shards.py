"""Writes tensors to safetensors files of bounded size, so that a conversion only needs memory for one."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

SHARD_BYTES = 2**30


class ShardWriter:
    """Collects tensors and writes a file whenever there are enough. `close` writes the rest and the index."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._weight_map: dict[str, str] = {}
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = 0
        self.num_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._weight_map

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor. It can share memory with others: each is written in full."""
        self._weight_map[name] = ""
        self._shard[name] = tensor
        size = tensor.numel() * tensor.element_size()
        self._shard_bytes += size
        self.num_bytes += size
        if self._shard_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the tensors collected so far."""
        if not self._shard:
            return
        number = len(set(self._weight_map.values()) - {""}) + 1
        file = f"model-{number:05d}.safetensors"
        tensors = {name: tensor.detach().clone(memory_format=torch.contiguous_format)
                   for name, tensor in self._shard.items()}  # fmt: skip
        try:
            save_file(tensors, self._directory / file, metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors does not have a class or error number for a full disk
            raise OSError(errno.ENOSPC if "code: 28" in str(error) else errno.EIO, str(error)) from error
        self._weight_map.update(dict.fromkeys(self._shard, file))
        self._shard, self._shard_bytes = {}, 0

    def close(self) -> None:
        self.flush()
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": self._weight_map}
        (self._directory / "model.safetensors.index.json").write_text(json.dumps(index))
