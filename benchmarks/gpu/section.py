"""The definition of a section of `benchmarks.gpu`, its inputs, and the rows that it returns."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.floors import Ceilings, CostModel
from pagemill.kernels.dispatch import FaceName

Part = Literal["preflight", "first", "1", "2"]
PARTS: tuple[Part, ...] = ("preflight", "first", "1", "2")


class Skipped(Exception):
    """A section can't run here; the message contains the reason."""


class Scale(Enum):
    FULL = "full"
    TINY = "tiny"
    """Toy shapes on a CPU: every line runs, but times are meaningless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result. `measured` and `floor` are in `unit`."""

    case: str
    measured: float | None = None
    unit: str = "s"
    """s; B/s, FLOP/s; error: relative, or absolute if the case states it; x: a ratio; requests."""
    floor: float | None = None
    """The lower bound on the time, from rates measured in the same run."""
    target: float | None = None
    """The target share of the floor; for a ratio, the target ratio."""
    ok: bool | None = None
    """For a check, whether it passed."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """The achieved share of the floor; 1.0 is the optimum."""
        return self.floor / self.measured if self.floor and self.measured else None

    @property
    def meets_target(self) -> bool | None:
        reached = self.measured if self.unit == "x" else self.share
        return None if self.target is None or reached is None else reached >= self.target

    def to_json(self) -> dict[str, Any]:
        figures = ("measured", "floor", "share")
        finite = {name: _finite(getattr(self, name)) for name in figures}
        return asdict(self) | finite | {"meets_target": self.meets_target}


def _finite(number: float | None) -> float | None:
    return None if number is None or not math.isfinite(number) else float(f"{number:.4g}")


Measure = Callable[[Callable[[], object]], float]
"""Device time of a call in seconds."""


@dataclass(frozen=True)
class Bench:
    """The inputs of a section."""

    scale: Scale
    device: torch.device
    measure: Measure
    found: Mapping[str, list[Row]] = field(default_factory=dict)
    """The rows of previous sections, by name."""
    seconds: float = math.inf
    """Seconds until the section is aborted."""
    fa3: Path | None = None
    """The library of FlashAttention 3 to compare with."""

    @property
    def is_tiny(self) -> bool:
        return self.scale is Scale.TINY

    @property
    def face(self) -> FaceName:
        """The measured kernels; on a CPU the reference operators replace them."""
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return "triton" if self.device.type == "cuda" or is_interpreted else "reference"

    @cached_property
    def ceilings(self) -> Ceilings:
        """The measured rates; NaN if not measured, and then floors are NaN too."""
        rates = {row.case: row.measured for row in self.found.get("ceilings", ())}
        return Ceilings(*(rates.get(name) or math.nan for name in ("copy", "bf16 product", "fp8 product")))

    @property
    def floor(self) -> CostModel:
        return CostModel(self.ceilings)


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    part: Part
    seconds: float
    """Time after which it is aborted; its rows so far are retained."""
    run: Callable[[Bench], Iterable[Row]]
    question: str
    """The question that its rows answer."""
    needs: tuple[Callable[[Bench], str | None], ...] = ()
    """Each returns the reason why the section can't run here, or None."""
    is_alone: bool = False
    """True if it needs a fresh process: it, or a process that it starts, uses all of the device's memory."""
    hint: str = ""
    """Where to look after a failure."""
