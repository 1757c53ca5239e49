"""Copies of small host lists to the device without a stall."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.int32] | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Copy `array` to `device`. GPUs use pinned memory, because a pageable copy waits for the stream to drain."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
