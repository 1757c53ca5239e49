"""MPT's attention through the paged cache. Imported for an MPT alone: it brings transformers' code for it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.mpt.modeling_mpt import MptAttention

from pagemill.engine.execution.attention import attend
from pagemill.kernels.types.scoring import Scoring


class PagedMptAttention(MptAttention):
    alibi_slopes: torch.Tensor

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        qkv = self.Wqkv(hidden_states[0])
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (x.unflatten(-1, (self.n_heads, self.head_dim)) for x in qkv.chunk(3, dim=-1))
        scoring = Scoring(self.softmax_scale, alibi_slopes=self.alibi_slopes)
        out = attend(self.layer_idx, query, key, value, scoring)
        return self.out_proj(out.flatten(1))[None], None
