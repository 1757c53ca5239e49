"""The columns of a run with `label_probs`: the label, its probability, and those of all labels."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.recipe import Recipe

LABEL = "label"
"""The output's column, unless the run sets another name: `label`, `label_prob`, `label_probs`."""
TEMPERATURE = "label_temperature"
"""The field of a line's `_pagemill` with the temperature that scaled its probabilities."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
_Temperature: TypeAlias = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]
_Listed = BeforeValidator(
    lambda given: given.split(",") if isinstance(given, str) and "," in given else given
)
LabelTemperature: TypeAlias = (
    _Temperature | Literal["fit"] | Annotated[tuple[_Temperature, ...], Field(min_length=2), _Listed]
)
"""One for all stages of a cascade, or one for each."""


@dataclass(frozen=True, slots=True)
class LabelColumns:
    """`column` is the output's; `temperature` scales the written values, but never the choice."""

    column: str
    temperature: float = 1.0

    @property
    def types(self) -> dict[str, str]:
        """Return the names of the columns next to the output's, and their types; "" for a mapping."""
        return {f"{self.column}_prob": "probability", f"{self.column}_probs": ""}

    def scale(self, kept: Mapping[str, Any]) -> float:
        """Return the temperature at which a result is written."""
        return self.temperature

    def values(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a result in the form of the journal."""
        sample = kept["outputs"][0]
        if sample.get("label_probs") is None:
            return {f"{self.column}_prob": None, f"{self.column}_probs": None}
        probs = scaled(sample["label_probs"], self.scale(kept))
        return {
            f"{self.column}_prob": probs[sample["label"]],
            f"{self.column}_probs": probs,
        }

    def restore(self, kept: dict[str, Any], fields: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Add the contents of a written line's columns to a result, the probabilities without scaling."""
        probs = fields.get(f"{self.column}_probs")
        if isinstance(probs, str):
            probs = json.loads(probs)
        known = scaled(probs, 1.0 / (meta.get(TEMPERATURE) or 1.0)) if isinstance(probs, dict) else {}
        kept["outputs"][0] |= {"label": fields.get(self.column), "label_probs": known}


def label_columns(
    recipe: Recipe, column: str, scale: LabelTemperature, gold: str | None, models: int
) -> list[LabelColumns]:
    """Return the columns of each of a run's models; none without `label_probs`. Raises DatasetError."""
    if not recipe.has_label_probs:
        if scale != 1.0:
            raise DatasetError("a label temperature needs label_probs")
        return []
    if scale == "fit":
        if gold is None:
            raise DatasetError("a temperature is fitted on gold values: name their column, with --gold")
        return [LabelColumns(column)] * models
    scales = scale if isinstance(scale, tuple | list) else (scale,) * models
    for each in scales:
        if not (isinstance(each, int | float) and MIN_TEMPERATURE <= each <= MAX_TEMPERATURE):
            raise DatasetError(
                f"a label temperature is a number from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, or fit"
            )
    if len(scales) != models:
        raise DatasetError(f"{len(scales)} label temperatures for {models} models: give one, or one for each")
    return [LabelColumns(column, float(each)) for each in scales]


def scaled(probs: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return probabilities in proportion to p ** (1 / temperature).

    Above 1 they become more similar, below 1 less; their order stays. Temperature scaling: Guo et al., "On Calibration
    of Modern Neural Networks", 2017; p is the exponential of its logit, up to a factor. It is undone by 1 /
    temperature, except for probabilities of 0.
    """
    if temperature == 1.0:
        return dict(probs)
    logs = {label: math.log(p) / temperature if p > 0 else -math.inf for label, p in probs.items()}
    peak = max(logs.values())
    powers = {label: math.exp(value - peak) for label, value in logs.items()}
    total = math.fsum(powers.values())
    return {label: power / total for label, power in powers.items()}


def by_label(probs: Mapping[str, float]) -> dict[str, float]:
    """Return probabilities by their labels in the form used for comparison, in which two labels may coincide."""
    found: dict[str, float] = {}
    for label, prob in probs.items():
        found[as_label(label)] = found.get(as_label(label), 0.0) + prob
    return found


def as_label(value: Any) -> str:
    """Return a gold value or an output in the form used for comparison."""
    return value.strip() if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
