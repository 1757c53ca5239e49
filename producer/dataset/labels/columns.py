"""The columns of a run with `label_probs`: the label, its probability, and those of all labels."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import Field

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.recipe import Recipe

LABEL = "label"
"""The output's column, unless the run names another: `label`, `label_prob`, `label_probs`."""
TEMPERATURE = "label_temperature"
"""The field of a line's `_pagemill` that says by what its probabilities were scaled."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
LabelTemperature: TypeAlias = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)] | Literal["fit"]


@dataclass(frozen=True, slots=True)
class LabelColumns:
    """`column` is the output's; `temperature` scales what is written, and never the choice."""

    column: str
    temperature: float = 1.0

    @property
    def types(self) -> dict[str, str]:
        """The names of the columns beside the output's, and their types; "" for a mapping."""
        return {f"{self.column}_prob": "probability", f"{self.column}_probs": ""}

    def values(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a sample as the journal keeps it."""
        probs = scaled(sample["label_probs"], self.temperature)
        return dict(zip(self.types, (probs[sample["label"]], probs), strict=True))

    def read(self, fields: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a sample that a written line tells, its probabilities without scaling."""
        probs = fields.get(f"{self.column}_probs")
        if isinstance(probs, str):
            probs = json.loads(probs)
        known = scaled(probs, 1.0 / (meta.get(TEMPERATURE) or 1.0)) if isinstance(probs, dict) else {}
        return {"label": fields.get(self.column), "label_probs": known}


class _Run(Protocol):
    """What these columns depend on in a run."""

    output_column: str
    label_temperature: LabelTemperature
    gold: str | None
    recipe: Recipe


def label_columns(run: _Run) -> LabelColumns | None:
    """Return a run's columns; None without `label_probs`. Raises DatasetError."""
    scale = run.label_temperature
    if not run.recipe.has_label_probs:
        if scale != 1.0:
            raise DatasetError("a label temperature needs label_probs")
        return None
    if scale == "fit":
        if run.gold is None:
            raise DatasetError("a temperature is fitted on gold values: name their column, with --gold")
        return LabelColumns(run.output_column)
    if not (isinstance(scale, int | float) and MIN_TEMPERATURE <= scale <= MAX_TEMPERATURE):
        raise DatasetError(
            f"a label temperature is a number from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, or fit"
        )
    return LabelColumns(run.output_column, float(scale))


def scaled(probs: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return probabilities in proportion to p ** (1 / temperature).

    Above 1 they become more alike, below 1 less; their order stays. Temperature scaling: Guo et al., "On Calibration of
    Modern Neural Networks", 2017; p stands for the exponential of its logit, up to a factor. It is undone by 1 /
    temperature, but for probabilities of 0.
    """
    if temperature == 1.0:
        return dict(probs)
    logs = {label: math.log(p) / temperature if p > 0 else -math.inf for label, p in probs.items()}
    peak = max(logs.values())
    powers = {label: math.exp(value - peak) for label, value in logs.items()}
    total = math.fsum(powers.values())
    return {label: power / total for label, power in powers.items()}
