"""Outputs with vectors, labels or scores, written and read back by a resumed run."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from typing import Any

from pagemill.producer.wire.schema.outputs import Rows


def output_of(kept: Mapping[str, Any], task: str) -> Any:
    """Return a row's output: a vector, a score per document, or a value per label."""
    rows = Rows.model_validate(kept["rows"]).to_lists()
    match task:
        case "embed":
            return rows[0] if len(rows) == 1 else rows
        case "rerank":
            return [row[0] for row in rows]
    named = [dict(zip(kept["labels"], row, strict=True)) for row in rows]
    return named[0] if len(named) == 1 else named


def kept_of(output: Any, task: str) -> dict[str, Any]:
    """Return the journal's result from which `output_of` makes this output."""
    given = output if isinstance(output, list) else [output]
    if task == "classify":
        labels = list(given[0])
        rows = [[float(row[label]) for label in labels] for row in given]
    elif task == "rerank":
        labels, rows = None, [[float(score)] for score in given]
    else:
        labels, rows = None, given if isinstance(given[0], list) else [given]
    width = len(rows[0])
    data = struct.pack(f"<{len(rows) * width}f", *(number for row in rows for number in row))
    stored = {"dtype": "float32", "shape": (len(rows), width), "data": base64.b64encode(data).decode()}
    return {"outputs": [{"index": 0, "text": "", "finish_reason": "stop"}], "rows": stored, "labels": labels}
