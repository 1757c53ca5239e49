"""Pagemill: generation jobs through Redis, into a continuously batched engine with a paged KV cache.

Importing it is cheap. Names load on first use: the producer's import redis and pydantic, `LLM` torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagemill import producer

if TYPE_CHECKING:
    from pagemill.bounds import InvalidParameter
    from pagemill.engine.errors import ConfigError, EngineError, InvalidRequest, ModelLoadError
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import BeamSearchParams, SamplingParams
    from pagemill.producer import *  # noqa: F403

__all__ = ["LLM", "SamplingParams", "BeamSearchParams"]
__all__ += ["EngineError", "InvalidRequest", "ConfigError", "ModelLoadError", "InvalidParameter"]
__all__ += producer.__all__

_HOMES = {
    "pagemill.bounds": ("InvalidParameter",),
    "pagemill.engine.llm": ("LLM",),
    "pagemill.engine.sampling_params": ("SamplingParams", "BeamSearchParams"),
    "pagemill.engine.errors": ("EngineError", "InvalidRequest", "ConfigError", "ModelLoadError"),
    "pagemill.producer": tuple(producer.__all__),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
