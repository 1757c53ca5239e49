"""Identifies paths that are not models, for messages with a remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

_TRAINING = re.compile(r"^(optimizer|scheduler|rng_state|training_args|trainer_state|global_step|scaler)")

_MERGE = "merge the two (PEFT's merge_and_unload) and give the result"


def _adapter_base(directory: Path) -> str | None:
    """Return the base model of an adapter's directory (PEFT); None if it does not contain an adapter."""
    file = directory / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return str(base or "its base model")


def missing_config_message(directory: Path) -> str:
    """Describe a directory without config.json, and a remedy."""
    if (base := _adapter_base(directory)) is not None:
        return f"{directory} is an adapter of {base}, not a model: {_MERGE}"
    return f"{directory} is not a model directory (config.json is missing): {found_instead(directory)}"


def found_instead(directory: Path) -> str:
    """Describe the unexpected contents of a directory."""
    try:
        names = sorted(file.name for file in directory.iterdir())
    except OSError as error:
        return f"it can't be read ({error.strerror})"
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if not names:
        return "it is empty"
    if (base := _adapter_base(directory)) is not None:
        return f"it holds an adapter of {base}: {_MERGE}"
    if ggufs:
        return f"it holds GGUF files: give one of them, as {directory / ggufs[0]}"
    training = [name for name in names if _TRAINING.match(name)]
    if training:
        return f"it holds the state of a training run ({training[0]})"
    nested = [file.parent.name for file in sorted(directory.glob("*/config.json"))]
    if nested:
        return f"did you mean {directory / nested[0]}?"
    return f"it holds {len(names)} other files, {names[0]} first"
