"""Copies of embeddings and head that PEFT saves with an adapter, which must equal the model's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from pagemill.engine.errors import AdapterError, ModelLoadError
from pagemill.engine.models.checkpoint import read_dense

_INSTEAD = "merge it into the model with PEFT's merge_and_unload, and serve the merged model"


def check_copies(copies: Mapping[str, torch.Tensor], directory: Path, embeddings: str) -> None:
    """Check that copies of complete weights equal those of the model.

    Args:
        copies: weights by the path of their module.
        directory: the model's folder.
        embeddings: the path of the module whose weight a tied head shares.

    Raises:
        AdapterError: one differs, or has other rows than the model, whose vocabulary was resized for the training.
    """
    for path, copied in copies.items():
        own = _stored(path, directory)
        if own is None:
            own = _stored(embeddings, directory)  # the head is tied to them
        if own is None:
            raise AdapterError(f"the copy of {path} cannot be compared with the model's: {_INSTEAD}")
        if own.shape != copied.shape:
            raise AdapterError(
                f"{path} has the shape {list(copied.shape)}, the model's has {list(own.shape)}: the vocabulary was "
                f"resized before the training; {_INSTEAD}"
            )
        if not torch.equal(own.to(copied.dtype), copied):
            raise AdapterError(f"{path} differs from the model's: {_INSTEAD}")


def _stored(path: str, directory: Path) -> torch.Tensor | None:
    """Return the checkpoint's weight of a module, even if its name has fewer or more outer modules."""
    wanted = f".{path}.weight"

    def is_wanted(name: str) -> bool:
        return wanted.endswith(f".{name}") or f".{name}".endswith(wanted)

    try:
        found = read_dense(directory, lambda name: name if is_wanted(name) else None)
    except ModelLoadError:  # there is none, or the weights are random
        return None
    return next(iter(found.values())) if len(found) == 1 else found.get(f"{path}.weight")
