"""A checkpoint on disk: config.json and the safetensors files, read without running any of its code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pagemill.engine.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
# Foreign files beside the weights: adapters, and Mistral's own format of the same tensors.
_NOT_WEIGHTS = re.compile(r"^(adapter|consolidated|optimizer|training)")
# Constants saved by older transformers: causal masks, and frequencies that follow from config.json.
_CONSTANTS = re.compile(r"(\.rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias)$")


def read_config(directory: Path) -> dict[str, Any]:
    """Read config.json. Raises `ModelLoadError`."""
    raw = read_json_object(directory / "config.json")
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method") if isinstance(method, dict) else method
        raise ModelLoadError(
            f"{directory} holds quantised weights ({method}), which are not supported; "
            "give the original checkpoint and set quantization instead"
        )
    return raw


def weight_files(directory: Path) -> list[Path]:
    """Return the model's safetensors files.

    Raises:
        ModelLoadError: there are none, or the index names missing files.
    """
    index = directory / _INDEX
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"can't read {index}: it has no weight_map")
        files = [directory / name for name in sorted(set(map(str, weight_map.values())))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ModelLoadError(
                f"can't load the weights in {directory}: {len(absent)} of {len(files)} files are missing, "
                f"{absent[0]} first"
            )
        return files
    if (directory / _WHOLE).is_file():
        return [directory / _WHOLE]
    files = [file for file in sorted(directory.glob("*.safetensors")) if not _NOT_WEIGHTS.match(file.name)]
    if not files:
        pickled = any(directory.glob("*.bin"))
        hint = "; *.bin files are pickles and are not read: convert them" if pickled else ""
        raise ModelLoadError(
            f"{directory} has no *.safetensors weights (load_format='dummy' needs none){hint}"
        )
    return files


def read_tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    """Return every tensor by name, mapped into memory rather than read.

    Raises:
        ModelLoadError: a file is truncated or not a safetensors file.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118, it is not a mapping
                    tensors[name] = opened.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise ModelLoadError(f"can't load the weights in {file}: {error}") from error
    return {name: tensor for name, tensor in tensors.items() if not _is_constant(name, tensor)}


def _is_constant(name: str, tensor: torch.Tensor) -> bool:
    # A real bias of that name would have one dimension.
    return bool(_CONSTANTS.search(name)) and (tensor.ndim != 1 or name.endswith("inv_freq"))


def read_json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"can't read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"can't read {file}: it is no JSON object")
    return content
