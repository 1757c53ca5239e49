"""Process-wide performance settings for a device, applied once before the model is loaded."""

from __future__ import annotations

import ctypes
import sys

import torch

from pagemill.engine.config import EngineConfig

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune_device(config: EngineConfig) -> None:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if sys.platform == "linux":
        # glibc maps every large temporary anew and faults its pages in; keeping the memory halves the cost of
        # operators that return megabytes.
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(1 << 30))
            libc.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(2**31 - 1))
