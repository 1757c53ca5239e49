"""The finding of a check: its level, a message, and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]
"""note: a fact without a verdict, or a check that could not run. error: jobs are lost, or do not run."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    message: str
    remedy: str = ""
    """The suggested action, if there is one."""


def worst(findings: list[Finding]) -> Level:
    """Return the most severe level among the findings."""
    order: tuple[Level, ...] = ("error", "warning", "note", "ok")
    return next((level for level in order if any(item.level == level for item in findings)), "ok")
