"""Recognizes the step errors that indicate a lost device, by their text."""

from __future__ import annotations

import re

_STICKY = re.compile(
    "illegal memory access|illegal instruction|device-side assert|unspecified launch failure|misaligned address"
    "|launch timed out|hardware stack error|invalid program counter|not supported on global/shared address space"
    "|ECC error|uncorrectable NVLink error|peer GPU memory over nvlink|tensor memory not completely freed"
    r"|context is destroyed|CUDA error: unknown error|fallen off the bus|\bXid\b|no CUDA-capable device is detected"
    "|CUDA-capable device.* busy or unavailable",
    re.IGNORECASE,
)
"""After these "the process must be terminated and relaunched" (CUDA Runtime API, cudaError_t): every later
call gives the same error. torch, Triton and HIP pass the texts on. Out of memory is not among them."""


def is_lost_device_error(error: BaseException) -> bool:
    """Return True if the device is lost. Other errors can also indicate it: see `Executor.is_device_alive`."""
    return isinstance(error, RuntimeError) and _STICKY.search(str(error)) is not None
