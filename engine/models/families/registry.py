"""Finds the family of a checkpoint."""

from __future__ import annotations

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.families import gemma, internlm, llama_like, mixtures, native, own_attention, phi
from pagemill.engine.models.families.baichuan import BAICHUAN
from pagemill.engine.models.families.bloom import BLOOM
from pagemill.engine.models.families.falcon import FALCON
from pagemill.engine.models.families.family import Family, RawConfig
from pagemill.engine.models.families.generic import generic_family
from pagemill.engine.models.families.mpt import MPT
from pagemill.engine.models.families.qwen import QWEN
from pagemill.engine.models.families.refusals import why_no_decoder, with_advice

_FAMILIES = (BAICHUAN, BLOOM, FALCON, MPT, QWEN, *gemma.FAMILIES, *internlm.FAMILIES, *llama_like.FAMILIES,
             *mixtures.FAMILIES, *native.FAMILIES, *own_attention.FAMILIES, *phi.FAMILIES)  # fmt: skip
FAMILIES = tuple(sorted(_FAMILIES, key=lambda family: family.name.casefold()))
SUPPORTED_MODEL_TYPES = tuple(sorted(kind for family in FAMILIES for kind in family.model_types))


def find_family(raw: RawConfig) -> Family:
    """Return the family that config.json names: a registered one, or the generic one.

    Raises:
        ModelLoadError: the family is not supported; the message lists those that are.
    """
    model_type, architectures = raw.get("model_type"), list(raw.get("architectures") or ())
    registered = next((family for family in FAMILIES if model_type in family.model_types), None)
    family = registered or generic_family(model_type)
    if family is None:
        named = f"model type {model_type!r}" + (
            f" ({', '.join(map(str, architectures))})" if architectures else ""
        )
        if isinstance(model_type, str) and (reason := why_no_decoder(model_type)) is not None:
            raise ModelLoadError(f"{named} is not supported: {with_advice(reason)}")
        raise ModelLoadError(
            f"{named} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}, and further decoders of "
            "transformers (docs/models.md)"
        )
    if architectures and not set(architectures) & set(family.architectures):
        raise ModelLoadError(
            f"architecture {architectures[0]!r} of model type {model_type!r} is not supported; supported: "
            f"{', '.join(family.architectures)}"
        )
    return family
