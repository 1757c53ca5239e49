"""The rotation of a layer's queries and keys in a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """RMS norm of every head, then rotation of its first `rotary_dim` values; each is optional."""

    cos: torch.Tensor | None = None
    """[num_tokens, rotary_dim] in the transformers layout: the second half repeats the first.

    Value i pairs with i + rotary_dim / 2. The last dimension is contiguous.
    """
    sin: torch.Tensor | None = None
    """The same shape and strides as `cos`."""
    query_weight: torch.Tensor | None = None
    """[head_dim]; None: no norm."""
    key_weight: torch.Tensor | None = None
    eps: float = 0.0

    @property
    def rotary_dim(self) -> int:
        return 0 if self.cos is None else self.cos.shape[-1]
