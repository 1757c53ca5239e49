"""The options of a purge, its progress, and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["look", "jobs", "wait", "rest", "prove"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeOptions:
    """Options of a purge."""

    wait_s: float = 30.0
    """Seconds to wait for running jobs; after that their records are removed too, and their workers fenced."""
    also: frozenset[str] = frozenset()
    """Names of erasers, for further data to remove."""
    dry_run: bool = False
    """Count without changes."""


@dataclass(frozen=True, slots=True)
class PurgeProgress:
    """The progress of a purge; `total` is 0 if unknown."""

    phase: Phase
    done: int
    total: int = 0


@dataclass(frozen=True, slots=True)
class Leftover:
    """Data that still names the tenant, or one of its jobs, batches or files."""

    key: str
    where: Literal["name", "content"]
    names: str
    """The tenant or the id that it contains."""


@dataclass(slots=True)
class PurgeReport:
    """The data that a purge removed, and the result of its proof. `remains` is empty if nothing is left."""

    queue: str
    tenant: str
    dry_run: bool = False
    jobs: dict[str, int] = field(default_factory=dict)
    """Jobs by the state in which they were found."""
    batches: int = 0
    api_batches: int = 0
    files: int = 0
    stored_files: int = 0
    """Payloads and results that were deleted from the store."""
    forced: int = 0
    """Jobs that were still running after the wait; later writes of their workers are fenced."""
    erased: dict[str, int] = field(default_factory=dict)
    """Further removed data, by the name of its eraser."""
    kept: list[str] = field(default_factory=list)
    """Erasers that were not requested: the proof skipped their keys."""
    keys_looked_at: int = 0
    remains: list[Leftover] = field(default_factory=list)

    @property
    def is_proven(self) -> bool:
        """True if the complete keyspace was searched and nothing was found."""
        return not self.dry_run and not self.remains
