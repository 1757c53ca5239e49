"""A step's replacements for its tokens' embeddings and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagemill.engine.layers.positions.sections import RotarySections


@dataclass(frozen=True, slots=True)
class MediaStep:
    """Vectors and positions of a step with media. A step with only text does not have them."""

    tokens: torch.Tensor
    """[num_vectors] int64: the step's tokens that vectors replace."""
    vectors: torch.Tensor
    """[num_vectors, hidden_size]: their embeddings."""
    deep: Sequence[torch.Tensor] = ()
    """[num_vectors, hidden_size] each: added to these tokens after the first decoder layers."""
    positions: torch.Tensor | None = None
    """[3, num_tokens] int64: every token's rotary positions. None: `StepInputs.positions` applies."""
    sections: RotarySections | None = None

    def embed(self, embedding: Any, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the step's embeddings, [num_tokens, hidden_size]."""
        hidden: torch.Tensor = embedding(input_ids)
        return (
            hidden.index_copy(0, self.tokens, self.vectors.to(hidden.dtype)) if len(self.tokens) else hidden
        )

    def add_deep(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return a decoder layer's output, [num_tokens, hidden_size], with this layer's vectors added."""
        if layer >= len(self.deep) or not len(self.tokens):
            return hidden
        return hidden.index_add(0, self.tokens, self.deep[layer].to(hidden.dtype))
