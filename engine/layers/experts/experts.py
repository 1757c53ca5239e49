"""The experts of one layer: rows sorted by expert, two grouped matmuls, and a weighted sum.

`Experts` replaces transformers' experts module inside its block, but not the block's router and shared experts.
Any model whose experts have transformers' layout can use it. Routers are also replaced if their family declares
their `routing` (`declare_routing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.experts.matrices import ExpertMatrices
from pagemill.engine.layers.experts.products import MakeGroupedProduct
from pagemill.engine.layers.experts.router import SparseMixer, make_router
from pagemill.engine.layers.library import gate_of, is_silu
from pagemill.engine.layers.linear import MakeProduct
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.kernels import dispatch
from pagemill.kernels.experts import Routing

_ROUTERS = ("gate", "router")


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """A layer's weights, read from the checkpoint when its matmuls are created."""

    inner: ExpertMatrices
    """Weights of the gate and up projections, or only of the up projection."""
    down: ExpertMatrices
    group: RankGroup | None = None
    """The ranks, each with a share of every expert's intermediate channels."""


class Experts(nn.Module):
    """sum over j of weights[j] * down_e(act(gate_e(x), up_e(x))), e = experts[j], for each row x."""

    def __init__(
        self,
        stored: StoredExperts,
        activation: Callable[[torch.Tensor], torch.Tensor],
        make: MakeGroupedProduct,
    ) -> None:
        super().__init__()
        self.num_experts = stored.inner.num_experts
        self.inner, self._activation = make(stored.inner), activation
        # Only one rank adds the bias.
        is_first = stored.group is None or stored.group.rank == 0
        self.down = make(stored.down if is_first else replace(stored.down, bias=None))
        self._group = stored.group

    def forward(
        self,
        hidden_states: torch.Tensor,  # [num_rows, hidden_size]
        top_k_index: torch.Tensor,  # [num_rows, top_k]
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        rows, places, offsets = dispatch.sort_by_expert(hidden_states, top_k_index, self.num_experts)
        inner = self._activation(self.inner(rows, offsets))
        out = dispatch.combine_experts(self.down(inner, offsets), places, top_k_weights)
        return out if self._group is None else self._group.all_reduce(out)


def declare_routing(module: nn.Module, routing_of: Callable[[Any], Routing | SparseMixer]) -> None:
    """Store the routing in every router of a model; `routing_of` maps a router to its routing."""
    for block in _blocks(module):
        for name in _ROUTERS:
            if (router := getattr(block, name, None)) is not None:
                router.routing = routing_of(router)


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """Declares the activation `dispatch.clamped_swiglu` of interleaved gate and up projections."""

    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        return dispatch.clamped_swiglu(gate_up, self.alpha, self.limit)


def replace_experts(module: nn.Module, make: MakeGroupedProduct, make_product: MakeProduct) -> None:
    """Replace experts, and routers of declared routing, layer by layer, so that memory is freed early.

    Args:
        make_product: creates a router's matmul.
    """
    for block in _blocks(module):
        block.experts = _experts_of(block.experts, make)
        for name in _ROUTERS:
            if hasattr(getattr(block, name, None), "routing"):
                setattr(block, name, make_router(getattr(block, name), make_product))


def experts_modules(module: nn.Module) -> dict[str, Any]:
    """Return transformers' experts modules by path."""
    return {path: part for path, part in module.named_modules() if _has_known_layout(part)}


def _blocks(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if _has_known_layout(getattr(part, "experts", None))]


def _has_known_layout(experts: Any) -> bool:
    """Return True for modules with the layout of transformers' `use_experts_implementation`."""
    names = ("has_gate", "has_bias", "is_transposed", "num_experts")
    has_layout = isinstance(experts, nn.Module) and all(hasattr(experts, name) for name in names)
    return has_layout and not getattr(experts, "has_post_expert_norm", False)


def _experts_of(source: Any, make: MakeGroupedProduct) -> Experts:
    inner_name = "gate_up_proj" if source.has_gate else "up_proj"
    stored = getattr(source, "stored", None) or StoredExperts(
        _matrices(source, inner_name), _matrices(source, "down_proj")
    )
    declared = getattr(source, "declared", None)
    if isinstance(declared, ClampedSwiglu):
        stored = replace(stored, inner=stored.inner.parted())
    for name in dict(source.named_parameters(recurse=False)):  # its method keeps the module alive
        source.register_parameter(name, None)
    source.stored = None
    return Experts(stored, declared or _activation(source), make)


def _matrices(source: Any, name: str) -> ExpertMatrices:
    bias = getattr(source, f"{name}_bias") if source.has_bias else None
    return ExpertMatrices.from_tensors(getattr(source, name), bias, is_transposed=source.is_transposed)


def _activation(source: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if not source.has_gate:
        activation: Callable[[torch.Tensor], torch.Tensor] = source.act_fn
        return activation
    gate, is_default = gate_of(source)
    return dispatch.silu_and_mul if is_default and is_silu(source.act_fn) else gate
