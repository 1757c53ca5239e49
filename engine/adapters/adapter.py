"""An adapter by name. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that has been read and checked."""

    name: str
    directory: Path
    digest: str
    """Identifies its weights and scale: of the same name, other weights are another adapter."""
    rank: int
    """The largest of its layers'."""
    num_bytes: int
    """In memory, as the device holds it."""
