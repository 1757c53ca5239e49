"""The memory of the prefix cache's host tier, and copies in both directions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from pagemill.engine.devices.backend import DeviceBackend
from pagemill.kernels.types.layer_cache import LayerCache, as_bytes
from pagemill.kernels.types.transfer import to_device

Pairs = list[tuple[int, int]]


class HostCache:
    """Counterparts of the device cache's tensors in host memory; pinned, so that CUDA copies directly.

    Copies are issued asynchronously on the current stream, like the steps that write and read the
    blocks.
    """

    def __init__(self, layers: list[LayerCache], num_blocks: int, device: DeviceBackend) -> None:
        self._tensors = [as_bytes(tensor) for layer in layers for tensor in layer.tensors()]
        self._hosts = [
            torch.empty((num_blocks, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=device.is_apart)
            for tensor in self._tensors
        ]

    def store(self, pairs: Pairs) -> None:
        """Copy (device block, host block) pairs to the host."""
        for device_ids, first, last in self._runs([(host, device) for device, host in pairs]):
            for tensor, host in zip(self._tensors, self._hosts, strict=True):
                host[first:last].copy_(tensor.index_select(0, device_ids), non_blocking=True)

    def load(self, pairs: Pairs) -> None:
        """Copy (host block, device block) pairs to the device."""
        for device_ids, first, last in self._runs(pairs):
            for tensor, host in zip(self._tensors, self._hosts, strict=True):
                tensor.index_copy_(0, device_ids, host[first:last].to(tensor.device, non_blocking=True))

    def _runs(self, pairs: Pairs) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield (device ids, first host id, last + 1) for runs of (host, device) pairs with consecutive host
        blocks.

        One copy per run: host ids are mostly assigned consecutively, and thousands of copies of one block
        each would take longer to issue than to execute.
        """
        ordered = np.array(sorted(pairs), dtype=np.int64)
        hosts, devices = ordered[:, 0], ordered[:, 1]
        for run in np.split(np.arange(len(pairs)), np.flatnonzero(np.diff(hosts) != 1) + 1):
            ids = to_device(devices[run], self._tensors[0].device)
            yield ids, int(hosts[run[0]]), int(hosts[run[-1]]) + 1
