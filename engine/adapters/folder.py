"""Reads a PEFT folder: `adapter_config.json` and `adapter_model.safetensors`.

Features of PEFT's `LoraConfig` beyond plain LoRA fail with an error that names them: ignoring them would change the
function. `LoraConfig` of PEFT 0.21 documents the fields.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagemill.engine.errors import AdapterError, ModelLoadError
from pagemill.engine.json_files import read_json_object
from pagemill.engine.models.checkpoint import read_tensors
from pagemill.engine.models.formats.pickled import converted_pickles

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_KNOWN = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
"""Fields that are read here, or that have no effect once an adapter is trained."""
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that change the model's weights, to which the adapter belongs."""
_REFUSED = {
    "use_dora": "DoRA",
    "lora_bias": "a separate bias",
    "modules_to_save": "whole modules (modules_to_save)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN_PATTERN = re.compile(r"\^?[\w.]+")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.(?:default\.)?weight")
_COPY = re.compile(r"base_model\.model\.((?:(?!lora_|base_layer)\w+\.)*(?!lora_|base_layer)\w+)\.weight")
"""PEFT saves embeddings and heads with an adapter after a resize of the vocabulary, or if it is not sure."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's change of one linear layer: x A^T B^T * scale."""

    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features, rank]"""
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The contents of a folder."""

    layers: dict[str, LowRank]
    """By the layer's path in the model on which it was trained."""
    copies: dict[str, torch.Tensor]
    """Complete weights of the model, by the path of their module."""
    digest: str


def read_adapter(directory: Path) -> AdapterFolder:
    """Read a folder, without accessing its model.

    Raises:
        AdapterError: the folder is not a PEFT folder, is damaged, or requires more than LoRA.
    """
    try:
        config = read_json_object(directory / CONFIG) if (directory / CONFIG).is_file() else None
        if config is None:
            raise AdapterError(
                f"{directory} has no {CONFIG}: give the folder that PEFT's save_pretrained wrote"
            )
        _check_config(config)
        file = _weight_file(directory)
        tensors = read_tensors([file])
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
        with file.open("rb") as weights:
            hashlib.file_digest(weights, lambda: digest)
    except ModelLoadError as error:
        raise AdapterError(str(error)) from error
    except (OSError, RecursionError) as error:
        raise AdapterError(f"can't read {directory}: {error}") from error
    copies = {match[1]: tensor for name, tensor in tensors.items() if (match := _COPY.fullmatch(name))}
    halves = {name: tensor for name, tensor in tensors.items() if not _COPY.fullmatch(name)}
    return AdapterFolder(_paired(halves, config), copies, digest.hexdigest()[:32])


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type {config.get('peft_type')!r} is not supported: LORA is")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise AdapterError(f"task_type {config.get('task_type')!r} is not supported: CAUSAL_LM is")
    for name, what in _REFUSED.items():
        if config.get(name):
            raise AdapterError(f"an adapter with {what} is not supported: merge it into the model instead")
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"an adapter with biases (bias={config['bias']!r}) is not supported: train with 'none'"
        )
    initial = str(config.get("init_lora_weights")).lower()
    if initial.startswith(_CHANGE_THE_BASE):
        raise AdapterError(
            f"init_lora_weights={initial!r} changes the model's own weights: convert the adapter to plain LoRA with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    unknown = sorted(
        name for name, value in config.items() if value and name not in _KNOWN and name not in _REFUSED
    )
    if unknown:
        raise AdapterError(f"{unknown[0][:200]!r} is not supported: only what plain LoRA has is")


def _weight_file(directory: Path) -> Path:
    if (directory / WEIGHTS).is_file():
        return directory / WEIGHTS
    if (directory / PICKLED).is_file():
        (converted,) = converted_pickles([directory / PICKLED])
        return converted
    raise AdapterError(f"{directory} has no {WEIGHTS}")


def _paired(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, LowRank]:
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(f"unsupported tensor {name[:200]!r}, {_reason_unsupported(name)}")
        if tensor.ndim != 2 or tensor.dtype not in _DTYPES:
            raise AdapterError(
                f"{name[:200]!r} is {tensor.dtype} of shape {list(tensor.shape)}, "
                "not a matrix of 16-, 32- or 64-bit floats"
            )
        halves.setdefault(match[1], {})[match[2]] = tensor
    if not halves:
        raise AdapterError("the folder has no weights")
    layers = {}
    for path, pair in sorted(halves.items()):
        if len(pair) != 2:
            raise AdapterError(f"{path} has only one of lora_A and lora_B")
        a, b = pair["A"], pair["B"]
        if len(a) != b.shape[1] or not len(a):
            raise AdapterError(f"{path}: lora_A has rank {len(a)} and lora_B {b.shape[1]}")
        if not config.get("rank_pattern") and config.get("r", len(a)) != len(a):
            raise AdapterError(
                f"{path} has rank {len(a)}, but {CONFIG} says r={config['r']!r:.20}; one file is of another training"
            )
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterError(f"{path} has values that are not finite")
        layers[path] = LowRank(a, b, _scale(path, len(a), config))
    for pattern in config.get("alpha_pattern") or ():
        if not any(_is_of(pattern, path) for path in layers):
            raise AdapterError(f"alpha_pattern has {pattern[:100]!r}, which matches no layer of it")
    return layers


def _reason_unsupported(name: str) -> str:
    if "lora_embedding" in name:
        return "an adapter of embeddings, which is not supported: train linear layers only"
    if "lora_magnitude" in name:
        return "which is DoRA's, and not supported: merge it into the model instead"
    if ".bias" in name:
        return "a bias, which is not supported: train with bias='none'"
    return "which is not a LoRA matrix"


def _scale(path: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return alpha / rank, or alpha / sqrt(rank), with the alpha that `alpha_pattern` has for this layer."""
    alpha = _matched(config.get("alpha_pattern"), path, config.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise AdapterError(f"lora_alpha is {alpha!r:.100}, not a number")
    if not abs(alpha) <= sys.float_info.max:  # also NaN, and integers beyond it
        raise AdapterError("lora_alpha is not a finite number of 64 bits")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matched(patterns: Any, path: str, default: Any) -> Any:
    """Return the value of the first pattern for this path, as PEFT matches them."""
    if patterns is None:
        return default
    if not isinstance(patterns, dict):
        raise AdapterError("alpha_pattern is not an object of names and numbers")
    for pattern, value in patterns.items():
        if not _PLAIN_PATTERN.fullmatch(pattern):  # an untrusted regular expression may run forever
            raise AdapterError(f"alpha_pattern has {pattern[:100]!r}: only names of layers are supported")
        if _is_of(pattern, path):
            return value
    return default


def _is_of(pattern: str, path: str) -> bool:
    name = pattern.removeprefix("^")
    return path == name or (name == pattern and path.endswith(f".{name}"))
