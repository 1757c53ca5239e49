"""Rotary frequencies that depend on the longest position, chosen once per engine.

transformers chooses them in every forward pass, by the largest position in the batch: `dynamic` recomputes
its base, `longrope` swaps its table. In a flattened batch that position may belong to another sequence, and
keys rotated by the old frequencies are already cached. So the longest sequence that the engine serves
determines them before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.library import ROPE_INIT_FUNCTIONS

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types whose frequencies depend on the longest position, until `fix_frequencies` has run."""
_MAX_FACTOR, _MAX_SETTING = 1e6, 1e12
# Types whose factor is the ratio by which the trained context is stretched.
_STRETCHING = ("linear", "dynamic", "yarn")


def depends_on_length(config: Any) -> bool:
    return any(rope.get("rope_type") in LENGTH_DEPENDENT for rope in _rope_settings(config))


def stretched_context(config: Any, context_length: int) -> int:
    """Return the longest context of the rotary scaling; `context_length` without scaling."""
    longest = context_length
    for rope in _rope_settings(config):
        if rope.get("rope_type") in _STRETCHING:
            trained = rope.get("original_max_position_embeddings") or context_length
            longest = max(longest, int(trained * (rope.get("factor") or 1.0)))
    return longest


def check_rope(config: Any) -> None:
    """Raise `ModelLoadError` for rotary settings from which frequencies or lengths cannot be computed."""
    for rope in _rope_settings(config):
        for name, value in rope.items():
            numbers = value if isinstance(value, list | tuple) else [value]
            most = _MAX_FACTOR if name == "factor" else _MAX_SETTING
            if any(isinstance(n, int | float) and not abs(n) <= most for n in numbers):
                raise ModelLoadError(
                    f"config.json: rope_scaling.{name} must be at most {most:g}: {value!r:.60}"
                )
        factor = rope.get("factor")
        if factor is not None and not (isinstance(factor, int | float) and factor > 0):
            raise ModelLoadError(f"config.json: rope_scaling.factor must be a number above 0: {factor!r:.60}")


def fix_frequencies(module: nn.Module, max_model_len: int) -> None:
    """Set every rotary embedding's frequencies permanently, for sequences of up to `max_model_len`."""
    for child in module.modules():
        rope_type = getattr(child, "rope_type", None)
        if isinstance(rope_type, str) and rope_type in LENGTH_DEPENDENT:
            embedding: Any = child
            embedding.inv_freq, embedding.attention_scaling = _frequencies(
                embedding, rope_type, max_model_len
            )
            embedding.rope_type = "default"
        elif isinstance(rope_type, dict):
            _fix_by_layer_type(child, rope_type, max_model_len)


def _fix_by_layer_type(embedding: Any, rope_types: dict[str, str], max_model_len: int) -> None:
    """Fix the frequencies of a model with windows in some layers, which has one set per type of layer."""
    for layer_type, rope_type in rope_types.items():
        if rope_type in LENGTH_DEPENDENT:
            inv_freq, scaling = _frequencies(embedding, rope_type, max_model_len, layer_type=layer_type)
            setattr(embedding, f"{layer_type}_inv_freq", inv_freq)
            setattr(embedding, f"{layer_type}_attention_scaling", scaling)
            rope_types[layer_type] = "default"


def _frequencies(
    embedding: Any, rope_type: str, max_model_len: int, **layer_type: str
) -> tuple[torch.Tensor, float]:
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](
        embedding.config, torch.device("cpu"), seq_len=max_model_len, **layer_type
    )
    settings = embedding.config.rope_parameters
    is_long = max_model_len > settings.get("original_max_position_embeddings", max_model_len)
    # Phi 3.5 MoE specifies its factors; those of others are computed.
    return frequencies, settings.get("long_mscale" if is_long else "short_mscale", scaling)


def _rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return the rotary settings: one, or one per type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in settings or not settings:
        return [settings]
    return [by_layer for by_layer in settings.values() if isinstance(by_layer, dict)]
