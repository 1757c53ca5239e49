"""Falcon's attention through the paged cache. Imported for a Falcon alone: it brings transformers' code for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from pagemill.engine.execution.attention import attend
from pagemill.engine.execution.families.falcon import num_kv_heads_of
from pagemill.kernels.types.scoring import Scoring


class PagedFalconAttention(FalconAttention):
    alibi_slopes: torch.Tensor | None

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        num_tokens, num_kv_heads = hidden_states.shape[1], num_kv_heads_of(self.config)
        # Every layout is the same: per KV head, the query heads that share it, its key, its value.
        heads = self.query_key_value(hidden_states).view(1, num_tokens, num_kv_heads, -1, self.head_dim)
        query, key, value = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
        if self.alibi_slopes is None:
            assert position_embeddings is not None
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings, unsqueeze_dim=2)
        scoring = Scoring(self.inv_norm_factor, alibi_slopes=self.alibi_slopes)
        out = attend(self.layer_idx, query[0], key[0], value[0], scoring)
        return self.dense(out.flatten(1))[None], None
