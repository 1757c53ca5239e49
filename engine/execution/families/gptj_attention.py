"""GPT-J's attention through the paged cache. Imported for a GPT-J alone: it brings transformers' code for it."""

from __future__ import annotations

import torch
from transformers.models.gptj.modeling_gptj import GPTJAttention

from pagemill.engine.execution.attention import attend
from pagemill.kernels.types.scoring import Scoring


class PagedGPTJAttention(GPTJAttention):
    def _attn(
        self,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim], rotated
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        out = attend(self.layer_idx, query, key, value, Scoring(1.0 / self.scale_attn))
        return out.transpose(0, 1)[None], None
