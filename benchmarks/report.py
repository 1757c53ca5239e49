"""The benchmarks' model and the place of their figures."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def result_path(name: str, at: datetime) -> Path:
    return RESULTS / f"{name}-{at.astimezone(UTC):%Y%m%dT%H%M%SZ}.json"


def write(path: Path, figures: dict[str, Any]) -> None:
    """Replace the file whole: a reader, or a run that is cut short, never meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(figures, indent=2) + "\n")
    partial.replace(path)


def model_directory(model: str) -> Path:
    """Return the directory of a model named on a command line; one of a hub is downloaded."""
    from pagemill.engine.errors import EngineError
    from pagemill.engine.models.directory import obtain_model

    try:
        return obtain_model(model, print).directory
    except EngineError as error:
        raise SystemExit(f"--model {model}: {error}") from None
