"""A row's line in the output: made from a result, and read back from a finished output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagemill.producer.dataset.label_columns import TEMPERATURE, LabelColumns
from pagemill.producer.dataset.pooled import kept_of, output_of
from pagemill.producer.dataset.recipe import Recipe
from pagemill.producer.dataset.schema_fields import field_values
from pagemill.producer.dataset.tables.compressed import data_suffix
from pagemill.producer.dataset.tables.rows import Row
from pagemill.producer.dataset.tables.writers import META, TEXT_CELLS


@dataclass(frozen=True, slots=True)
class OutputLines:
    """The lines of one run; a result is a dict in the form of the journal."""

    recipe: Recipe
    column: str
    """The name of the output's column."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """The fields of the schema with separate columns, and their types."""
    labels: LabelColumns | None = None
    """The columns of a run with `label_probs`."""

    def make(self, row: Row, name: str, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return the input's columns, the output and its origin. An earlier run's `_pagemill` is replaced."""
        samples = kept["outputs"]
        meta = {
            "key": name,
            "row": row.number,
            "finish_reason": samples[0].get("finish_reason"),
            "usage": kept.get("usage"),
        }
        if samples[0].get("reasoning") is not None:
            meta["reasoning"] = samples[0]["reasoning"]
        if any(sample.get("logprobs") is not None for sample in samples):
            meta["logprobs"] = [sample.get("logprobs") for sample in samples]
        columns = {name: value for name, value in (row.fields or {}).items() if name != META}
        output = output_of(kept, self.recipe.task) if self.recipe.is_pooled else self._output_value(samples)
        values = field_values(output, self.fields)
        added = {f"{self.column}.{field}": value for field, value in values.items()}
        if self.labels is not None:
            added = self.labels.values(kept)
            meta[TEMPERATURE] = self.labels.scale(kept)
        return {**columns, self.column: output, **added, META: meta}

    def _output_value(self, samples: list[dict[str, Any]]) -> Any:
        """Return the value of the row's output.

        A text; the parsed value if a shape was requested; text and calls if tools were called; a list for n > 1. For
        scores a log-probability, or one per continuation.
        """
        if self.recipe.is_scored:
            scores = [sample["logprob"] for sample in samples]
            names = self.recipe.fields.get("continuations")
            return scores[0] if names is None else dict(zip(map(_name, names), scores, strict=True))
        if self.labels is not None:
            return samples[0]["label"]
        values = [_value(sample) for sample in samples]
        return values[0] if len(values) == 1 else values

    def read(self, fields: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]] | None:
        """Return a line's name and its result as far as it can be reconstructed; None if it is not a line of a run."""
        meta = fields.get(META)
        if isinstance(meta, str):
            meta = _loaded(meta)
        if not isinstance(meta, dict) or not isinstance(meta.get("key"), str):
            return None
        kept = self._journal_result(fields.get(self.column), meta, path)
        if self.labels is not None:
            self.labels.restore(kept, fields, meta)
        return meta["key"], kept

    def _journal_result(self, output: Any, meta: Mapping[str, Any], path: Path) -> dict[str, Any]:
        wants_json, samples = self.recipe.wants_json, int(self.recipe.fields.get("n") or 1)
        is_plain = not (self.recipe.is_scored or self.recipe.is_pooled or "tools" in self.recipe.fields)
        is_encoded = wants_json or samples > 1 or not is_plain
        if isinstance(output, str) and data_suffix(path) in TEXT_CELLS and is_encoded:
            loaded = _loaded(output)
            output = output if loaded is None else loaded
        finish_reason = meta.get("finish_reason")
        if self.recipe.is_pooled:
            return kept_of(output, self.recipe.task) | {"usage": meta.get("usage") or {}}
        if self.recipe.is_scored:
            scores = output.values() if isinstance(output, dict) else [output]
            scored = [{"logprob": score, "finish_reason": finish_reason} for score in scores]
            return {"outputs": scored, "usage": meta.get("usage") or {}}
        outputs = []
        for index, value in enumerate(output if samples > 1 and isinstance(output, list) else [output]):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            is_parsed = not isinstance(value, str) or (wants_json and finish_reason == "stop")
            parsed = value if is_parsed else None
            outputs.append({"index": index, "text": text, "parsed": parsed, "finish_reason": finish_reason})
        if meta.get("reasoning") is not None:
            outputs[0]["reasoning"] = meta["reasoning"]
        for sample, logprobs in zip(outputs, meta.get("logprobs") or (), strict=False):
            sample["logprobs"] = logprobs
        return {"outputs": outputs, "usage": meta.get("usage") or {}}


def _value(sample: Mapping[str, Any]) -> Any:
    if sample.get("tool_calls"):
        return {"content": sample["text"], "tool_calls": sample["tool_calls"]}
    return sample["parsed"] if sample.get("parsed") is not None else sample["text"]


def _name(continuation: Any) -> str:
    """Return a continuation's name in an output: its text, or its token ids."""
    return continuation if isinstance(continuation, str) else " ".join(map(str, continuation))


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None
