"""The tensors of recurrent state, separate from the KV blocks: a slot for each row and for cached states.

A sequence's slot has the index of its row. It receives both at its admission and loses both when it ends or is
preempted. A new sequence in a row does not read the slot's previous state, unless a cached state was copied to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from pagemill.engine.config import EngineConfig, SchedulerConfig, divide_states
from pagemill.engine.devices.adapter_memory import reserved_bytes
from pagemill.engine.devices.backend import DeviceBackend
from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.recurrent import StateShape
from pagemill.kernels.types.transfer import to_device


class StatePool:
    """The states of all slots."""

    def __init__(self, shape: StateShape, num_slots: int, device: DeviceBackend) -> None:
        meta = torch.device("meta")
        self._device = device.device
        self.layers = [
            [
                device.zeros(torch.empty(num_slots, *tensor.shape, dtype=tensor.dtype, device=meta))
                for tensor in tensors
            ]
            for tensors in shape
        ]
        """Per recurrent layer: its tensors [num_slots, ...]."""

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy slots (source, destination) sequentially: a source may have been a destination before."""
        for run in _independent_runs(pairs):
            destinations, sources = to_device(np.array(list(run.items()), dtype=np.int64).T, self._device)
            for tensors in self.layers:
                for tensor in tensors:
                    tensor[destinations] = tensor[sources]


def _independent_runs(pairs: list[tuple[int, int]]) -> Iterator[dict[int, int]]:
    """Divide copies into runs, source by destination, whose sources can all be read before any is written."""
    run: dict[int, int] = {}
    for source, destination in pairs:
        if source in run or destination in run:
            yield run
            run = {}
        run[destination] = source
    if run:
        yield run


def with_states(
    limits: SchedulerConfig, config: EngineConfig, shape: KVCacheShape, device: DeviceBackend
) -> SchedulerConfig:
    """Return the limits of a model that keeps a state per sequence: memory may lower max_num_seqs.

    Raises:
        ConfigError: a setting is not supported with such models, or memory cannot hold the states.
    """
    if not shape.state:
        return limits
    for name, value in (("host_cache_gib", config.host_cache_gib),
                        ("num_speculative_tokens", config.num_speculative_tokens)):  # fmt: skip
        if value:
            message = f"{name}={value!r} is not supported for models with recurrent layers: a state has no earlier one"
            raise ConfigError(message, setting=name)
    memory = config.kv_cache_memory_bytes or device.free_bytes(config) - reserved_bytes(config, device)
    num_states = max(0, memory) // shape.state_bytes
    asked = config.state_cache_bytes if config.enable_prefix_caching else 0
    max_num_seqs, num_cached = divide_states(
        num_states,
        limits.max_num_seqs,
        None if asked is None else asked // shape.state_bytes,
        has_blocks=shape.num_layers > 0,
        is_fixed=config.max_num_seqs is not None,
    )
    if not 0 < max_num_seqs <= num_states - num_cached:
        raise ConfigError(
            f"{memory} bytes hold the states of {num_states} sequences, of {shape.state_bytes} bytes each: "
            "lower max_num_seqs or state_cache_bytes, or raise kv_cache_memory_bytes",
            setting="max_num_seqs",
        )
    return replace(
        limits,
        max_num_seqs=max_num_seqs,
        state_bytes=shape.state_bytes,
        num_cached_states=num_cached,
        enable_prefix_caching=num_cached > 0,
        num_speculative_tokens=0,
    )
