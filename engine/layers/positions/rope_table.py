"""Cosines and sines of positions, looked up in every step instead of computed."""

from __future__ import annotations

from typing import Any

import torch

from pagemill.engine.layers.positions.rope import LENGTH_DEPENDENT

_FIRST_POSITIONS = 1024
"""Initial rows of a table."""


class RotaryTable:
    """Cached output of one of transformers' embeddings for the positions so far."""

    def __init__(self, embedding: Any) -> None:
        """`embedding`: one of transformers' for which `holds` is true."""
        self._embedding = embedding
        self._table = self._computed(_FIRST_POSITIONS)

    @staticmethod
    def holds(embedding: Any) -> bool:
        """Return True if the embedding has one set of frequencies, regardless of the positions."""
        rope_type = getattr(embedding, "rope_type", None)
        return isinstance(rope_type, str) and rope_type not in LENGTH_DEPENDENT

    def rows(self, positions: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos [num_tokens, rotary_dim] and sin [num_tokens, rotary_dim // 2] of positions below
        `length`.

        Only the first half of cos holds cosines: transformers' second halves repeat the first.
        """
        if length > len(self._table):
            self._table = self._computed(max(length, 2 * len(self._table)))
        rows = self._table.index_select(0, positions)
        return rows, rows[:, rows.shape[1] // 2 :]

    def _computed(self, length: int) -> torch.Tensor:
        """Compute [length, rotary_dim]: half of the cosines, followed by half of the sines."""
        cos, sin = self._embedding(torch.empty(0), torch.arange(length)[None])
        half = cos.shape[-1] // 2
        return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)
