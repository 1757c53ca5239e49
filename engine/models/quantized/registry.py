"""Finds the format of a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.models.quantized.awq import Awq
from pagemill.engine.models.quantized.compressed import CompressedTensors
from pagemill.engine.models.quantized.float4 import Mxfp4
from pagemill.engine.models.quantized.float8 import Float8
from pagemill.engine.models.quantized.gguf import Gguf
from pagemill.engine.models.quantized.gptq import Gptq
from pagemill.engine.models.quantized.scheme import Scheme

SCHEMES: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Float8,
    "fp8": Float8,
    "gguf": Gguf,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""Formats by `quant_method`."""


def find_scheme(quantization: Any) -> Scheme | None:
    """Return the format of a `quantization_config`; None if there is none.

    Raises:
        ModelLoadError: the format, or a setting of it, is unsupported or unreadable.
    """
    if not quantization:
        return None
    if not isinstance(quantization, dict):
        raise ModelLoadError(f"can't read quantization_config: it is {quantization!r}")
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in SCHEMES:
        raise ModelLoadError(
            f"weights quantized by {method!r} are not supported (supported: {', '.join(SCHEMES)}); "
            "give the original checkpoint, and set quantization=int8 to make it smaller"
        )
    return SCHEMES[method](quantization)
