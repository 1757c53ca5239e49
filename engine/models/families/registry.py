"""Which family a checkpoint belongs to."""

from __future__ import annotations

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.families import native
from pagemill.engine.models.families.aquila import AQUILA
from pagemill.engine.models.families.baichuan import BAICHUAN
from pagemill.engine.models.families.bloom import BLOOM
from pagemill.engine.models.families.falcon import FALCON
from pagemill.engine.models.families.family import Family, RawConfig
from pagemill.engine.models.families.gemma import GEMMA, GEMMA3_MULTIMODAL
from pagemill.engine.models.families.gptj import GPTJ
from pagemill.engine.models.families.internlm import INTERNLM, INTERNLM2, INTERNLM3
from pagemill.engine.models.families.mpt import MPT
from pagemill.engine.models.families.phi import PHI, PHI3
from pagemill.engine.models.families.qwen import QWEN

FAMILIES = (
    AQUILA,
    BAICHUAN,
    BLOOM,
    FALCON,
    GEMMA,
    GEMMA3_MULTIMODAL,
    native.GPT2,
    native.GPT_BIGCODE,
    GPTJ,
    native.GPT_NEOX,
    INTERNLM,
    INTERNLM2,
    INTERNLM3,
    native.LLAMA,
    native.MISTRAL,
    MPT,
    native.OPT,
    PHI,
    PHI3,
    QWEN,
    native.QWEN2,
    native.QWEN3,
    native.SMOLLM3,
)
SUPPORTED_MODEL_TYPES = tuple(sorted(kind for family in FAMILIES for kind in family.model_types))


def find_family(raw: RawConfig) -> Family:
    """The family that config.json names.

    Raises:
        ModelLoadError: none of ours; the message lists what is supported.
    """
    model_type, architectures = raw.get("model_type"), list(raw.get("architectures") or ())
    for family in FAMILIES:
        if model_type in family.model_types:
            if architectures and not set(architectures) & set(family.architectures):
                raise ModelLoadError(
                    f"architecture {architectures[0]!r} of model type {model_type!r} is not supported; supported: "
                    f"{', '.join(family.architectures)}"
                )
            return family
    named = f"model type {model_type!r}" + (
        f" ({', '.join(map(str, architectures))})" if architectures else ""
    )
    raise ModelLoadError(f"{named} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
