"""An adapter by name. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that has been read and checked."""

    name: str
    directory: Path
    digest: str
    """Identifies its weights and scale: different weights with the same name are a different adapter."""
    rank: int
    """The largest rank of its layers."""
    num_bytes: int
    """Bytes in the device's memory."""
