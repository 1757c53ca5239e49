"""Transfers a step's small host arrays to the device.

Every separate copy costs a launch, and one from pageable memory also waits until the device has caught up,
which would prevent the overlap of planning and execution. So a step's arrays are packed into one pinned
buffer and copied once.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagemill.engine.devices.backend import DeviceBackend

_ALIGNMENT = 16
_FIRST_BYTES = 2**18
_NUM_SLOTS = 2
"""Number of steps whose arrays can be in transfer at the same time: one in flight, one in preparation."""


class Transfer(Protocol):
    """Moves arrays to the device. `put` a step's arrays, then call `send`; they are readable only afterwards."""

    num_copies: int

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return the tensor that holds `array` after `send`; valid until the second `send` after that."""
        ...

    def send(self) -> None: ...


class DirectTransfer:
    """Copies each array separately and immediately; on the CPU it copies nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_copies = 0

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        self.num_copies += 1
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def send(self) -> None:
        pass


class _Slot:
    """A host buffer, pinned if the device requires it, its counterpart on the device, and the pending copy."""

    def __init__(self, device: DeviceBackend, num_bytes: int) -> None:
        self.host = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.is_apart)
        self.numpy = self.host.numpy()
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device.device)
        self.num_used = 0
        self._mark = device.mark
        self._copied = device.mark()

    def copy(self) -> None:
        used = slice(0, self.num_used)
        self.device[used].copy_(self.host[used], non_blocking=True)
        self._copied = self._mark()

    def reuse(self) -> None:
        """Wait until the device has read the host's bytes. It usually has: they were sent at least one step ago."""
        self._copied.synchronize()
        self.num_used = 0


class StagedTransfer:
    """Copies all of a step's arrays together.

    A step larger than any before (a long prompt) needs one extra copy, and the buffer grows.
    """

    def __init__(self, device: DeviceBackend, num_bytes: int = _FIRST_BYTES) -> None:
        self._device = device
        self._slots = [_Slot(device, num_bytes) for _ in range(_NUM_SLOTS)]
        self._current = 0
        self.num_copies = 0

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        array = np.ascontiguousarray(array)
        slot = self._slots[self._current]
        begin = -(-slot.num_used // _ALIGNMENT) * _ALIGNMENT
        if begin + array.nbytes > len(slot.numpy):
            slot, begin = self._grow(slot, array.nbytes), 0
        end = begin + array.nbytes
        slot.numpy[begin:end] = array.reshape(-1).view(np.uint8)
        slot.num_used = end
        dtype = torch.from_numpy(array[:0]).dtype
        return slot.device[begin:end].view(dtype).view(array.shape)

    def send(self) -> None:
        slot = self._slots[self._current]
        if slot.num_used:
            slot.copy()
            self.num_copies += 1
        self._current = (self._current + 1) % _NUM_SLOTS
        self._slots[self._current].reuse()

    def _grow(self, full: _Slot, num_bytes: int) -> _Slot:
        """Send the pending bytes, and continue in a larger slot; tensors of the old one stay valid."""
        if full.num_used:
            full.copy()
            self.num_copies += 1
        slot = _Slot(self._device, 2 * max(len(full.numpy), num_bytes))
        self._slots[self._current] = slot
        return slot
