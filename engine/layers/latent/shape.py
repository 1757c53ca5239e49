"""The sizes of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of an attention's heads, and of the data cached for all of them."""

    num_heads: int
    unrotated: int
    """Number of unrotated values of a query or key."""
    rotated: int
    value: int
    """Size of a value vector."""
    rank: int
    """Size of a latent."""

    @property
    def cached(self) -> int:
        """Number of cached values per token."""
        return self.rank + self.rotated

    @property
    def expanded(self) -> int:
        """Number of values in a token's keys and values, over all heads."""
        return self.num_heads * (self.unrotated + self.rotated + self.value)

    @classmethod
    def from_attention(cls, attention: Any) -> LatentShape | None:
        """Return the shape of one of transformers' attentions; None if it does not have cacheable latents."""
        projection = getattr(attention, "kv_b_proj", None)
        if not hasattr(attention, "expand_kv") or not isinstance(projection, nn.Linear):
            return None
        unrotated, value, rank = attention.qk_nope_head_dim, attention.v_head_dim, projection.in_features
        num_heads, rest = divmod(projection.out_features, unrotated + value)
        if rest or getattr(projection, "bias", None) is not None:
            return None
        return cls(num_heads, unrotated, attention.qk_rope_head_dim, value, rank)
