"""The limit of a device's memory for adapters."""

from __future__ import annotations

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.backend import DeviceBackend
from pagemill.engine.errors import ConfigError

_SHARE = 8
_MOST_BYTES = 2**30


def adapter_bytes_for(config: EngineConfig, device: DeviceBackend) -> int:
    """Return the bytes for adapters in memory. Raises `ConfigError` if the setting exceeds the memory."""
    total = device.total_bytes()
    if config.adapter_memory_bytes is None:
        return min(_MOST_BYTES, total // _SHARE)
    if config.adapter_memory_bytes > total:
        raise ConfigError(
            f"adapter_memory_bytes: {config.adapter_memory_bytes:,} is more than the {total:,} bytes of memory there "
            "are",
            setting="adapter_memory_bytes",
        )
    return config.adapter_memory_bytes


def expects_adapters(config: EngineConfig) -> bool:
    """Return True if memory is reserved for adapters: there are some at startup, or the setting is given."""
    return bool(config.adapters) or config.adapter_memory_bytes is not None


def reserved_bytes(config: EngineConfig, device: DeviceBackend) -> int:
    """Return the memory that the KV pool must leave for adapters, on a device with separate memory.

    Without adapters at startup, and without the setting, later ones share the memory that the pool does not use.
    """
    return adapter_bytes_for(config, device) if device.is_apart and expects_adapters(config) else 0
