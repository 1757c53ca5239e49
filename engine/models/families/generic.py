"""Any other causal language model of transformers that uses its attention interface.

`pagemill.engine.layers.observation` inspects such a model after loading and rejects unsupported
attention; `pagemill.engine.execution.model_probe` compares its logits with those of transformers.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.latent.shape import LatentShape
from pagemill.engine.layers.library import CAUSAL_LM_NAMES
from pagemill.engine.layers.observation import AttentionShape, observe_attention
from pagemill.engine.layers.recurrent import RECURRENT_LAYERS, STATELESS_LAYERS, recurrent_kinds
from pagemill.engine.models.families.adaptations import ADAPTATIONS, PAST_PADDING
from pagemill.engine.models.families.family import Family, RawConfig, native_config, nothing, zero
from pagemill.engine.models.families.refusals import ENCODER_DECODER, MORE_THAN_TEXT, with_advice

_LAYER_TYPES = (
    frozenset({"full_attention", "sliding_attention", "chunked_attention"})
    | RECURRENT_LAYERS
    | STATELESS_LAYERS
)


def generic_family(model_type: Any) -> Family | None:
    """Return the family of one of transformers' causal language models by its `model_type`, if any."""
    architecture = CAUSAL_LM_NAMES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None or model_type not in CONFIG_MAPPING:
        return None
    return Family(
        name=f"transformers' {model_type}",
        model_types=(model_type,),
        architectures=(architecture,),
        build_config=partial(_build_config, model_type),
        num_kv_heads=lambda _config: 1,  # observed, as layers may differ
        adapt=ADAPTATIONS.get(model_type, nothing),
        first_position=_past_padding if model_type in PAST_PADDING else zero,
        is_generic=True,
    )


def _past_padding(config: Any) -> int:
    return int(config.pad_token_id or 0) + 1


def refusal(model_type: str, reason: str) -> ModelLoadError:
    return ModelLoadError(f"model type {model_type!r} is not supported: {with_advice(reason)}")


def attention_shape(module: Any, *, caches_latents: bool) -> AttentionShape:
    """Return the shape of a loaded model's attention.

    Args:
        caches_latents: latent attention caches the latents, not keys and values.

    Raises:
        ModelLoadError: paged attention would differ, or the model does not support packed batches.
    """
    model_type = module.config.model_type
    parameters = inspect.signature(module.forward).parameters
    has_positions = hasattr(module.config, "num_attention_heads")
    for name in ("position_ids", "logits_to_keep") if has_positions else ("logits_to_keep",):
        if name not in parameters:
            raise refusal(model_type, f"the forward pass does not accept {name}")
    counting = (part for part in module.modules() if hasattr(part, "create_position_ids_from_input_ids"))
    if not all(hasattr(part, "counts_positions") for part in counting):
        raise refusal(model_type, "its positions begin past the padding token's id")
    try:
        seen = observe_attention(module, module.config.num_hidden_layers)
    except ModelLoadError as error:
        raise refusal(model_type, str(error)) from error
    except Exception as error:  # transformers' code may raise anything
        raise refusal(model_type, f"the forward pass fails ({error!r})") from error
    return _with_latents(module, seen) if caches_latents else seen


def _with_latents(module: Any, seen: AttentionShape) -> AttentionShape:
    """Return the shape of a latent cache, if every attention has latents of the same size."""
    latents = [shape for part in module.modules() if (shape := LatentShape.from_attention(part)) is not None]
    if len(latents) != len(seen.windows) or len(set(latents)) != 1:
        return seen
    return replace(seen, num_kv_heads=1, head_dim=latents[0].cached, latent=latents[0])


def _build_config(model_type: str, raw: RawConfig) -> PretrainedConfig:
    try:
        config: Any = native_config(raw)
    except Exception as error:  # the file can make transformers' validation raise anything
        _check_defaults(model_type)
        raise ValueError(f"model type {model_type!r}: {error}") from error
    _check_type(model_type, config)
    assert isinstance(config, PretrainedConfig)
    return config


def _check_defaults(model_type: str) -> None:
    """Raise ModelLoadError for a type that cannot be served, regardless of config.json."""
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:  # it has no defaults
        return
    _check_type(model_type, config)


def _check_type(model_type: str, config: Any) -> None:
    """Raise ModelLoadError for a configuration whose model cannot be served."""
    if config.is_encoder_decoder:
        raise refusal(model_type, ENCODER_DECODER)
    if config.get_text_config(decoder=True) is not config:
        raise refusal(model_type, f"{MORE_THAN_TEXT} (text_config)")
    others = sorted(set(map(str, getattr(config, "layer_types", None) or ())) - _LAYER_TYPES)
    if others:
        raise refusal(model_type, f"it has layers of type {', '.join(others)}")
    if recurrent_kinds(config):
        return
    if not getattr(config, "num_attention_heads", None):  # raises for some whose layers are of several types
        raise refusal(model_type, "its configuration has no attention heads")
