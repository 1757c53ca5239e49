"""The sizes of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of an attention's heads, and of what is cached for all of them."""

    num_heads: int
    unrotated: int
    """Numbers of a query or key that are not rotated."""
    rotated: int
    value: int
    """Numbers of a value."""
    rank: int
    """Numbers of a latent."""

    @property
    def cached(self) -> int:
        """Numbers that the cache holds per token."""
        return self.rank + self.rotated

    @property
    def expanded(self) -> int:
        """Numbers of a token's keys and values, of all heads."""
        return self.num_heads * (self.unrotated + self.rotated + self.value)

    @classmethod
    def from_attention(cls, attention: Any) -> LatentShape | None:
        """Return the shape of one of transformers' attentions; None: it has no latents that could be cached."""
        projection = getattr(attention, "kv_b_proj", None)
        if not hasattr(attention, "expand_kv") or not isinstance(projection, nn.Linear):
            return None
        unrotated, value, rank = attention.qk_nope_head_dim, attention.v_head_dim, projection.in_features
        num_heads, rest = divmod(projection.out_features, unrotated + value)
        if rest or getattr(projection, "bias", None) is not None:
            return None
        return cls(num_heads, unrotated, attention.qk_rope_head_dim, value, rank)
