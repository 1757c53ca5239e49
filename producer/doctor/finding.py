"""What a check found: good, doubtful or bad, in words, with what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]
"""note: a fact without a verdict, or what could not be looked at. error: jobs are or will be lost, or don't run."""


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    message: str
    remedy: str = ""
    """What to do, where there is something."""


def worst(findings: list[Finding]) -> Level:
    """The gravest level among them."""
    order: tuple[Level, ...] = ("error", "warning", "note", "ok")
    return next((level for level in order if any(item.level == level for item in findings)), "ok")
