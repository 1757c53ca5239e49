"""BLOOM's attention through the paged cache. Imported for a BLOOM alone: it brings transformers' code for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.bloom.modeling_bloom import BloomAttention

from pagemill.engine.execution.attention import attend
from pagemill.kernels.types.scoring import Scoring


class PagedBloomAttention(BloomAttention):
    alibi_slopes: torch.Tensor

    def forward(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        # [1, num_heads, num_tokens, head_dim] each
        heads = self._reshape(self.query_key_value(hidden_states))
        query, key, value = (x[0].transpose(0, 1) for x in heads)
        scoring = Scoring(self.inv_norm_factor, alibi_slopes=self.alibi_slopes)
        out = attend(self.layer_idx, query, key, value, scoring)
        return residual + self.dense(out.flatten(1))[None], None
