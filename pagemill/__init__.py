"""Pagemill: generation jobs through Redis, into a continuously batched engine with a paged KV cache.

Importing it is cheap. Names load on first use: the producer's import redis and pydantic, `LLM` torch.

PYTEST_DONT_REWRITE: without this word, pytest warns if a process imports pagemill before it calls `pytest.main`.
"""

from __future__ import annotations

from pagemill import producer
from pagemill.common.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "pagemill.engine.llm": ("LLM",),
        "pagemill.engine.sampling_params": ("SamplingParams", "BeamSearchParams"),
        "pagemill.engine.errors": ("EngineError", "InvalidRequest", "ConfigError", "ModelLoadError"),
        "pagemill.common.bounds": ("InvalidParameter",),
        "pagemill.producer": tuple(producer.__all__),
    },
)
