"""Finds the family of a checkpoint."""

from __future__ import annotations

from typing import Any

from pagemill.common.plugins import PluginError, Plugins
from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.families import gemma, internlm, llama_like, mixtures, native, own_attention, phi
from pagemill.engine.models.families.baichuan import BAICHUAN
from pagemill.engine.models.families.bloom import BLOOM
from pagemill.engine.models.families.falcon import FALCON
from pagemill.engine.models.families.family import Family, RawConfig
from pagemill.engine.models.families.generic import generic_family
from pagemill.engine.models.families.mpt import MPT
from pagemill.engine.models.families.multimodal import MULTIMODAL
from pagemill.engine.models.families.qwen import QWEN
from pagemill.engine.models.families.refusals import decoder_refusal, with_advice

_FAMILIES = (BAICHUAN, BLOOM, FALCON, MPT, QWEN, *gemma.FAMILIES, *internlm.FAMILIES, *llama_like.FAMILIES,
             *mixtures.FAMILIES, *native.FAMILIES, *own_attention.FAMILIES, *phi.FAMILIES)  # fmt: skip
FAMILIES = tuple(sorted(_FAMILIES, key=lambda family: family.name.casefold()))
SUPPORTED_MODEL_TYPES = tuple(
    sorted({kind for family in FAMILIES for kind in family.model_types} | MULTIMODAL.keys())
)
_PLUGINS: Plugins[Family] = Plugins(
    "pagemill.families", "a Family", lambda one: isinstance(one, Family), SUPPORTED_MODEL_TYPES
)
"""The families of other packages, by `model_type`."""


def _family_of(model_type: Any, raw: RawConfig) -> Family | None:
    if isinstance(model_type, str) and (wrapper := MULTIMODAL.get(model_type)) is not None:
        return wrapper.family(find_family(wrapper.text_config(raw)))
    registered = next((family for family in FAMILIES if model_type in family.model_types), None)
    if registered is not None or not isinstance(model_type, str):
        return registered
    return _plugin(model_type) or generic_family(model_type)


def _plugin(model_type: str) -> Family | None:
    try:
        return _PLUGINS.find(model_type)
    except PluginError as error:
        raise ModelLoadError(f"model type {model_type!r} is not supported: {error}") from error


def find_family(raw: RawConfig) -> Family:
    """Return the family that config.json names: a registered one, another package's, or the generic one.

    Raises:
        ModelLoadError: the family is not supported; the message lists those that are.
    """
    model_type, architectures = raw.get("model_type"), list(raw.get("architectures") or ())
    known = (*SUPPORTED_MODEL_TYPES, *_PLUGINS.names)  # also logs names that clash
    family = _family_of(model_type, raw)
    if family is None:
        named = f"model type {model_type!r}" + (
            f" ({', '.join(map(str, architectures))})" if architectures else ""
        )
        if isinstance(model_type, str) and (reason := decoder_refusal(model_type)) is not None:
            raise ModelLoadError(f"{named} is not supported: {with_advice(reason)}")
        raise ModelLoadError(
            f"{named} is not supported; supported: {', '.join(known)}, and further decoders of transformers "
            "(docs/models.md)"
        )
    if architectures and not set(architectures) & set(family.architectures):
        raise ModelLoadError(
            f"architecture {architectures[0]!r} of model type {model_type!r} is not supported; supported: "
            f"{', '.join(family.architectures)}"
        )
    return family
