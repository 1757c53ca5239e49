"""JSON files of models and adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pagemill.engine.errors import ModelLoadError


def read_json_object(file: Path) -> dict[str, Any]:
    """Return a file's object. Raises ModelLoadError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"can't read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"can't read {file}: not a JSON object")
    return content
