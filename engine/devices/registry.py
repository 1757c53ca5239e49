"""The device backends by name."""

from __future__ import annotations

import torch

from pagemill.engine.devices.backend import DeviceBackend
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.errors import ConfigError


def find_device(name: str) -> DeviceBackend:
    """Return the backend for `EngineConfig.device`. Raises `ConfigError` if the device does not exist."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CpuBackend()
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device; use device=cpu")
    return CudaBackend()
