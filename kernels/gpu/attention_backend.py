"""The interface of a library's paged attention on a GPU."""

from __future__ import annotations

from typing import Protocol

import torch

from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring


class Unavailable(Exception):
    """A library cannot run here; the message contains the reason and the package to install."""


class PagedAttentionBackend(Protocol):
    """A library's paged attention. It loads on first use."""

    def require(self, device: torch.device) -> None:
        """Load the library for this device. Raises `Unavailable`."""

    def unsupported(self, query: torch.Tensor, cache: LayerCache, scoring: Scoring) -> str | None:
        """Return the part of a layer that the library does not support; None if it computes the layer."""

    def attend(
        self, query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
    ) -> torch.Tensor:
        """See `pagemill.kernels.dispatch.paged_attention`.

        A call for decode rows can be captured in a graph: it reads lengths and block tables on the device. Its
        launches depend only on shapes and on the metadata's bounds.
        """
