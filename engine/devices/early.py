"""Kernel compilation in another process, started before this process imports transformers."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch


def compiling_early(device: str) -> AbstractContextManager[None]:
    """Compile the common CPU kernels in another process during the block, if `EngineConfig.device` means the CPU.

    Transformers' model classes take a second to import; the other process starts in this time.
    """
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return nullcontext()
    if importlib.util.find_spec("numba") is None:
        return nullcontext()
    from pagemill.kernels.cpu.layer import compile_ahead

    return compile_ahead.compiling_early()
