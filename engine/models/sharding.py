"""Builds a model's class and module for one rank's share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.layers.sharded_linear import GatheredHead, RowParallelLinear
from pagemill.engine.layers.share import Cut, Rows, ShardingPlan


def sharded_class(module_class: Any, plan: ShardingPlan, group: RankGroup) -> Any:
    """Subclass `module_class` with layers of the rank's size, so that transformers loads cut tensors into it."""

    def __init__(self: Any, config: Any, *args: Any, **options: Any) -> None:
        module_class.__init__(self, config, *args, **options)
        _shrink_layers(self, plan, group)

    members = {"__init__": __init__, "__module__": module_class.__module__, "__doc__": module_class.__doc__}
    return type(module_class.__name__, (module_class,), members)


def finish_sharding(module: Any, plan: ShardingPlan, group: RankGroup) -> None:
    """Split the remaining parts after loading: the head over the vocabulary, and per-head tensors of attention."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(f"tensor_parallel_size={group.size}: the model's head is not a linear layer; use 1")
    module.set_output_embeddings(GatheredHead(head, plan.share, group))
    for child in module.modules():
        for name in ("alibi_slopes", "sinks"):
            if isinstance(per_head := getattr(child, name, None), torch.Tensor):
                part = per_head.detach()[plan.share.of(len(per_head))].clone()
                is_parameter = isinstance(per_head, nn.Parameter)
                setattr(child, name, nn.Parameter(part, requires_grad=False) if is_parameter else part)
    for parent in {name.rpartition(".")[0]: None for name, _ in module.named_modules() if plan.layer(name)}:
        _count_own_heads(module.get_submodule(parent), plan)


def _count_own_heads(parent: Any, plan: ShardingPlan) -> None:
    """Set a module's head counts to the rank's, if it has split layers."""
    split = plan.split
    for name in split.head_widths:
        if hasattr(parent, name):
            setattr(parent, name, getattr(parent, name) // plan.share.size)
    for names, count in ((split.head_counts, plan.num_heads), (split.kv_head_counts, plan.num_kv_heads)):
        for name in names:
            if hasattr(parent, name):
                setattr(parent, name, count)
    if split.counts_in_config and hasattr(parent, "config"):
        parent.config = copy.copy(parent.config)
        parent.config.num_attention_heads = plan.num_heads
        parent.config.num_key_value_heads = plan.num_kv_heads


def _shrink_layers(module: nn.Module, plan: ShardingPlan, group: RankGroup) -> None:
    if missing := plan.missing(name for name, _ in module.named_modules()):
        raise ConfigError(f"tensor_parallel_size={group.size}: the model has no {missing[0]} to split; use 1")
    for name, layer in list(module.named_modules()):
        if (cut := plan.layer(name)) is None:
            continue
        if not isinstance(layer, nn.Linear) and not plan.split.has_transposed_weights:
            raise ConfigError(
                f"tensor_parallel_size={group.size}: the plan splits {name}, which is not a linear layer"
            )
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, _part_of(layer, cut, plan, group))


def _part_of(layer: Any, cut: Cut, plan: ShardingPlan, group: RankGroup) -> nn.Linear:
    out_features, in_features = layer.weight.shape
    if plan.split.has_transposed_weights:
        in_features, out_features = out_features, in_features
    options = {"bias": layer.bias is not None, "device": layer.weight.device, "dtype": layer.weight.dtype}
    if isinstance(cut, Rows):
        inputs = plan.share.of(in_features)
        return RowParallelLinear(inputs.stop - inputs.start, out_features, group, **options)
    outputs = plan.outputs(cut, out_features)
    return nn.Linear(in_features, sum(part.stop - part.start for part in outputs), **options)
