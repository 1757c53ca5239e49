"""The interface of a model family: converts its config.json and tensors to one of transformers' modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.share import TensorSplit

RawConfig = Mapping[str, Any]
"""The content of config.json."""
Tensors = dict[str, torch.Tensor]
"""A checkpoint's tensors by name."""


def native_config(raw: RawConfig) -> PretrainedConfig:
    """Build the configuration like transformers, but without remote code: `auto_map` is only a field here."""
    config: PretrainedConfig = CONFIG_MAPPING[raw["model_type"]].from_dict(_with_floats(dict(raw)))
    return config


def _with_floats(value: Any) -> Any:
    """Return a value of config.json with the infinities that transformers writes as objects."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def grouped_kv_heads(config: Any) -> int:
    """Return the configured KV heads, or one per query head if the configuration has none."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def unchanged(tensors: Tensors, _config: PretrainedConfig) -> Tensors:
    """Return a checkpoint's tensors as they are: names and layouts are the module's."""
    return tensors


def nothing(_module: torch.nn.Module) -> None:
    pass


def _never(_config: Any) -> bool:
    return False


def zero(_config: Any) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row of docs/models.md. The callables' defaults have no effect, which suits transformers' families."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json."""
    architectures: tuple[str, ...]
    """Values of `architectures` in config.json; a checkpoint with only other values is another kind of model."""
    build_config: Callable[[RawConfig], PretrainedConfig] = native_config
    """Raises `ModelLoadError` for settings that transformers' module would ignore."""
    convert_tensors: Callable[[Tensors, PretrainedConfig], Tensors] = unchanged
    """Converts the checkpoint's names and layouts to the module's. It may modify its argument."""
    text_name: Callable[[str], str | None] | None = None
    """Returns a tensor's name in the text model; None: it is not read. No function: the checkpoint is text-only."""
    decoder: DecoderTraits | None = None
    """The decoder's known traits; None: its layers remain unmodified."""
    adapt: Callable[[torch.nn.Module], None] = nothing
    """Rewires the loaded module, in place and still on the CPU."""
    has_attention_interface: bool = True
    """False if the modules compute attention themselves, which `adapt` replaces."""
    num_kv_heads: Callable[[Any], int] = grouped_kv_heads
    split: TensorSplit | None = None
    """Division of its layers among ranks; None: transformers' plan."""
    extrapolates: Callable[[Any], bool] = _never
    """Returns True if positions past the trained context are computable and sensible (ALiBi)."""
    first_position: Callable[[Any], int] = zero
    """Returns the position of a text's first token."""
    is_generic: bool = False
    """True if only transformers' code is known: the model is observed and probed at startup."""


def replace_attention(module: torch.nn.Module, attention: type, **methods: Any) -> list[Any]:
    """Replace methods of every attention of this class in a model; return these attentions."""
    paged = type(f"Paged{attention.__name__}", (attention,), methods)
    found = [child for child in module.modules() if isinstance(child, attention)]
    for child in found:
        child.__class__ = paged
    return found


def require(condition: bool, message: str) -> None:
    """Reject a configuration that the conversion cannot represent. Raises `ModelLoadError`."""
    if not condition:
        raise ModelLoadError(message)
