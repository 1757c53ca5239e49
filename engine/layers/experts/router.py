"""The router of a mixture of experts: logits in fp32, and expert selection.

Logits are never rounded to bfloat16 or integers, regardless of the model's other matmuls: rounding that swaps two
experts changes an entire row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.linear import DenseProduct, MakeProduct
from pagemill.kernels import dispatch
from pagemill.kernels.experts import Routing


class Router(nn.Module):
    """Maps rows [any, hidden_size] to logits, weights and experts, like transformers' routers."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing, make_product: MakeProduct
    ) -> None:
        """`bias` is the layer's bias. Raises `ModelLoadError` for groups that do not divide the experts."""
        super().__init__()
        num_experts, self._hidden_size = weight.shape
        if num_experts % routing.num_groups or not 0 < routing.top_k <= num_experts:
            raise ModelLoadError(
                f"{num_experts} experts in {routing.num_groups} groups, of which a token takes {routing.top_k}"
            )
        self.product = make_product([weight.detach()], bias) or DenseProduct(weight.detach(), bias)
        self.routing = routing
        self.correction: torch.Tensor | None = None
        """fp32 [num_experts], added to the scores only for the selection."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = hidden_states.reshape(-1, self._hidden_size).float()
        logits: torch.Tensor = self.product(rows)
        weights, indices = dispatch.route(logits, self.correction, self.routing)
        return logits, weights, indices


class SparseMixerRouter(nn.Module):
    """Phi-MoE's router: the best expert, then the best of the others, each weighted among the scores close to it.

    Source: Liu et al. 2024, "GRIN: GRadient-INformed MoE", SparseMixer-v2 at inference.
    """

    def __init__(self, weight: torch.Tensor, jitter: float, make_product: MakeProduct) -> None:
        super().__init__()
        self._hidden_size = weight.shape[1]
        self._limit = 2 * jitter
        self.product = make_product([weight.detach()], None) or DenseProduct(weight.detach(), None)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits: torch.Tensor = self.product(hidden_states.reshape(-1, self._hidden_size).float())
        first_weight, first = self._best(logits, logits)
        others = logits.scatter(-1, first, float("-inf"))
        second_weight, second = self._best(logits, others)
        weights = torch.cat([first_weight, second_weight], dim=-1)
        return logits, weights, torch.cat([first, second], dim=-1)

    def _best(self, logits: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest, index = left.max(dim=-1, keepdim=True)
        is_far = (largest - logits) / logits.abs().clamp(min=largest) > self._limit
        weights = left.masked_fill(is_far, float("-inf")).softmax(dim=-1)
        return weights.gather(-1, index), index


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """Declares a `SparseMixerRouter`."""

    jitter: float


def make_router(source: Any, make_product: MakeProduct) -> nn.Module:
    """Return the replacement of one of transformers' routers whose `routing` a family has declared.

    Raises:
        ModelLoadError: its sizes do not match the routing.
    """
    weight = source.weight.detach().float()
    if isinstance(source.routing, SparseMixer):
        return SparseMixerRouter(weight, source.routing.jitter, make_product)
    bias = getattr(source, "bias", None)
    router = Router(weight, None if bias is None else bias.detach().float(), source.routing, make_product)
    correction = getattr(source, "e_score_correction_bias", None)
    router.correction = None if correction is None else correction.detach().float()
    return router
