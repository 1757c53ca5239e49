"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) over a cache of latents.

Keys and values of all heads are projections of one latent vector per token. Each head's key projection is absorbed
into its queries, and its value projection is applied to the attention output. So the cache contains the latents
and the rotated part of the keys, which all heads share, as the keys of one KV head. Its values are the
latents: the leading values of those keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.latent.shape import LatentShape
from pagemill.engine.layers.linear import weight_of
from pagemill.engine.layers.quantized_weight import dense


class LatentProducts(nn.Module):
    """The projections of one attention from queries to latents, and from weighted latents to values."""

    def __init__(self, shape: LatentShape, weight: torch.Tensor) -> None:
        """`weight`: [num_heads * (unrotated + value), rank], the weight of transformers' `kv_b_proj`."""
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(weight.view(shape.num_heads, -1, shape.rank), requires_grad=False)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries for the cached keys.

        Args:
            query: [1, num_heads, num_tokens, unrotated + rotated], rotated.

        Returns:
            [1, num_heads, num_tokens, rank + rotated].
        """
        unrotated = self.shape.unrotated
        latent = torch.bmm(query[0, ..., :unrotated], self.weight[:, :unrotated])
        return torch.cat([latent, query[0, ..., unrotated:]], dim=-1)[None]

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Return the attended values.

        Args:
            attended: [1, num_tokens, num_heads, rank + rotated]; the rotated values are not read.

        Returns:
            [1, num_tokens, num_heads, value].
        """
        latents = attended[0, ..., : self.shape.rank].transpose(0, 1)
        values = torch.bmm(latents, self.weight[:, self.shape.unrotated :].transpose(1, 2))
        return values.transpose(0, 1)[None]


def _as_cached(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one KV head's keys and values; replaces transformers' `expand_kv`.

    Args:
        latents: [1, 1, num_tokens, rank], normed; rotated: [1, 1, num_tokens, rotated].
    """
    keys = torch.cat([latents, rotated], dim=-1)
    return keys, keys


def absorb_products(module: nn.Module) -> None:
    """Make the attentions of a model pass latents, and matching queries, to the attention function."""
    attention: Any
    for attention in list(module.modules()):
        if (shape := LatentShape.from_attention(attention)) is not None:
            attention.latent = LatentProducts(shape, dense([weight_of(attention.kv_b_proj)]))
            attention.kv_b_proj, attention.expand_kv = None, _as_cached
