"""The ranks of one model and the three collectives they need, on torch.distributed.

The backend is used as an object of its own, without torch's default process group: an engine can then come and go
in a process that has another engine, or that uses torch.distributed for purposes of its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=300)
"""How long a collective waits for the others. They start it together, unless one of them compiles kernels first."""
_LOOPBACK = "127.0.0.1"


class RankGroup:
    """One rank's place among the others.

    Every collective is called by all ranks in the same order with tensors of the same shape, on their own devices.
    Gloo has carried it out when the call returns; with NCCL it is queued on the current stream.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend: Any = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def claim_device(self, name: str) -> None:
        """Rank r computes on GPU r, on the calling thread from now on. `name`: `EngineConfig.device`.

        Rank 0 says so too: a program that has chosen another GPU for itself would have two ranks meet on one.
        """
        if name != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(self.rank)

    def connect(self, rendezvous: str, device: torch.device) -> None:
        """Meet the others at a file that nobody else uses. Returns when all are there; raises RuntimeError."""
        store = dist.FileStore(rendezvous, self.size)  # type: ignore[attr-defined]
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _TIMEOUT
            self._backend = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            # NCCL meets the others in its first collective: now, and not in somebody's first request.
            self.all_reduce(torch.zeros(1, device=device)).item()
        else:
            # On the loopback device: by default gloo asks what address the machine's name stands for, which
            # needs not resolve, and would listen there.
            settings: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            settings._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
            settings._timeout = _TIMEOUT
            self._backend = dist.ProcessGroupGloo(store, self.rank, self.size, settings)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        self._backend.allreduce([tensor]).wait()
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor, into everybody's."""
        self._backend.broadcast(tensor, 0).wait()

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, on rank 0; elsewhere none."""
        tensors = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_first else []
        options = dist.GatherOptions()
        options.rootRank = 0
        # The others give no list at all, and not an empty one: NCCL refuses that.
        self._backend.gather([tensors] if self.is_first else [], [tensor], options).wait()
        return tensors

    def close(self) -> None:
        """Leave the others; whatever still waits for them on the device ends. Again is no error."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()
