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
    """A section can't run here; the message says why."""


class Scale(Enum):
    FULL = "full"
    TINY = "tiny"
    """Toy shapes, on a CPU: every line runs, and no time says anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. `measured` and `floor` are in `unit`."""

    case: str
    measured: float | None = None
    unit: str = "s"
    """s; B/s, FLOP/s; error: relative, or absolute where the case says so; x: a ratio; requests."""
    floor: float | None = None
    """The least time there could be, by the rates measured in the same run."""
    target: float | None = None
    """The share of the floor that is aimed at; of a ratio, the ratio."""
    ok: bool | None = None
    """Of a check: whether it holds."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """The share of the floor that was reached: 1.0 is as fast as can be."""
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
    """A run as a section sees it."""

    scale: Scale
    device: torch.device
    measure: Measure
    found: Mapping[str, list[Row]] = field(default_factory=dict)
    """The rows of the sections before, by name."""
    seconds: float = math.inf
    """Until the section is cut."""
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
        """What this run measured; NaN where it did not, and floors with it."""
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
    """What its rows answer."""
    needs: tuple[Callable[[Bench], str | None], ...] = ()
    """Each returns why the section can't run here, or None."""
    is_alone: bool = False
    """True if it needs a fresh process: it, or a process that it starts, uses all of the device's memory."""
    hint: str = ""
    """What to look at when it fails."""
