"""Builds a model's class and module for one rank's share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.layers.sharded_linear import GatheredHead, RowParallelLinear
from pagemill.engine.layers.share import COLUMNS, ShardingPlan


def sharded_class(module_class: Any, plan: ShardingPlan, group: RankGroup) -> Any:
    """Subclass `module_class` with layers of the rank's size, so that transformers loads cut tensors into it."""

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        module_class.__init__(self, config, *args, **options)
        _shrink_layers(self, plan, group)

    members = {"__init__": __init__, "__module__": module_class.__module__, "__doc__": module_class.__doc__}
    return type(module_class.__name__, (module_class,), members)


def finish_sharding(module: Any, plan: ShardingPlan, group: RankGroup) -> None:
    """Split the rest after loading: the head over the vocabulary, and ALiBi slopes and head counts."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(f"tensor_parallel_size={group.size}: the model's head is no linear layer; use 1")
    module.set_output_embeddings(GatheredHead(head, plan.share, group))
    for child in module.modules():
        slopes = getattr(child, "alibi_slopes", None)
        if isinstance(slopes, torch.Tensor):
            child.alibi_slopes = slopes[plan.share.of(len(slopes))].clone()
        if hasattr(child, "qkv_proj"):
            _give_own_heads(child, plan)


def _give_own_heads(attention: Any, plan: ShardingPlan) -> None:
    """Give an attention that splits queries from keys by its configuration's heads a config with the rank's."""
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads = plan.num_heads
    attention.config.num_key_value_heads = attention.num_key_value_heads = plan.num_kv_heads


def _shrink_layers(module: nn.Module, plan: ShardingPlan, group: RankGroup) -> None:
    for name, layer in list(module.named_modules()):
        style = plan.style(name)
        if style is None:
            continue
        if type(layer) is not nn.Linear:
            raise ConfigError(
                f"tensor_parallel_size={group.size}: the plan splits {name}, which is no linear layer"
            )
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, _part_of(layer, name, style, plan, group))


def _part_of(layer: nn.Linear, name: str, style: str, plan: ShardingPlan, group: RankGroup) -> nn.Linear:
    if style != COLUMNS:
        inputs = plan.share.of(layer.in_features)
        return RowParallelLinear(layer, inputs.stop - inputs.start, group)
    return nn.Linear(
        layer.in_features,
        sum(part.stop - part.start for part in plan.outputs(name, layer.out_features)),
        bias=layer.bias is not None,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
