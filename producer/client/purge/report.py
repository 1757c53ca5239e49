"""What a purge was asked, how far it is, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["look", "jobs", "wait", "rest", "prove"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeOptions:
    """Options of a purge."""

    wait_s: float = 30.0
    """Patience with jobs that run, until their records go too and their workers are refused."""
    also: frozenset[str] = frozenset()
    """Names of erasers: what else is to go."""
    dry_run: bool = False
    """Count, and change nothing."""


@dataclass(frozen=True, slots=True)
class PurgeProgress:
    """How far a purge is; `total` is 0 where that is not known."""

    phase: Phase
    done: int
    total: int = 0


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that still names the tenant, or one of its jobs, batches or files."""

    key: str
    where: Literal["name", "content"]
    names: str
    """The tenant or the id that stands there."""


@dataclass(slots=True)
class PurgeReport:
    """What a purge removed, and what its proof found. `remains` is empty unless something is left."""

    queue: str
    tenant: str
    dry_run: bool = False
    jobs: dict[str, int] = field(default_factory=dict)
    """Jobs by the state they were found in."""
    batches: int = 0
    api_batches: int = 0
    files: int = 0
    stored_files: int = 0
    """Payloads and results that were deleted from the store."""
    forced: int = 0
    """Jobs that still ran when the patience was over: what their workers write is refused."""
    erased: dict[str, int] = field(default_factory=dict)
    """What else was removed, by the name of its eraser."""
    kept: list[str] = field(default_factory=list)
    """Erasers that were not asked for: the proof passed over their keys."""
    keys_looked_at: int = 0
    remains: list[Leftover] = field(default_factory=list)

    @property
    def is_proven(self) -> bool:
        """Whether the whole keyspace was searched and nothing was found."""
        return not self.dry_run and not self.remains
