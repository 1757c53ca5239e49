"""The ranks of one model and their three collectives, on torch.distributed.

The backend is used directly, without torch's default process group: an engine can then be created and closed in a
process that has another engine, or that uses torch.distributed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=300)
"""Timeout of a collective's wait for other ranks. They start together, unless one compiles kernels first."""


class RankGroup:
    """One rank's membership in the group.

    Every collective is called by all ranks in the same order with tensors of the same shape, on their own devices.
    With Gloo it is complete when the call returns; with NCCL it is queued on the current stream.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend: Any = None
        self._is_alone = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Disable exchange inside the block, for steps whose values are not read, even before the ranks have met."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def connect(self, rendezvous: str, collectives: Callable[[Any, int, int, timedelta], Any]) -> None:
        """Meet the other ranks at a file used by no other group. Returns once all have joined. Raises
        RuntimeError.

        Args:
            collectives: `DeviceBackend.collectives` of the ranks' devices.
        """
        store = dist.FileStore(rendezvous, self.size)  # type: ignore[attr-defined]
        self._backend = collectives(store, self.rank, self.size, _TIMEOUT)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if not self._is_alone:
            self._backend.allreduce([tensor]).wait()
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's tensor into every rank's."""
        if not self._is_alone:
            self._backend.broadcast(tensor, 0).wait()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor on rank 0, and an empty list on other ranks."""
        if self._is_alone:
            return [tensor] * self.size if self.is_first else []
        tensors = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_first else []
        options = dist.GatherOptions()
        options.rootRank = 0
        # The others pass None, since NCCL rejects an empty list.
        self._backend.gather([tensors] if self.is_first else [], [tensor], options).wait()
        return tensors

    def close(self) -> None:
        """Leave the group; device work that waits for it ends. Safe to call repeatedly."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()
