"""A complete decoder layer in machine code: norm, attention over the paged cache, norm, gated MLP.

Called operator by operator, a layer of a small model spends a third of a decode step in Python and in
allocating results. Here the matmuls, row operators, cache writer and attention kernels call one another in
machine code, on buffers that all layers share. Values are identical to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagemill.kernels.cpu.matmul.kinds import KindName
from pagemill.kernels.types.layer_cache import LayerCache, largest_number
from pagemill.kernels.types.scoring import Scoring

ADDRESS = np.int64
LAYER = np.dtype(
    [
        *((name, ADDRESS) for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm")),
        *((name, ADDRESS) for name in ("qkv", "qkv_bias", "o", "o_bias")),
        *((name, ADDRESS) for name in ("gate_up", "gate_up_bias", "down", "down_bias")),
        *((f"{name}_format", np.int64) for name in ("qkv", "o", "gate_up", "down")),
        *((name, ADDRESS) for name in ("key_cache", "value_cache", "key_scales", "value_scales")),
        *((name, ADDRESS) for name in ("slopes", "sinks")),
        *((name, np.int64) for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")),
        *((name, np.int64) for name in ("head_dim", "block_size", "window", "group", "rotates")),
        *((name, np.float64) for name in ("eps", "qk_eps", "scale", "softcap")),
        ("limit", np.float32),
    ]
)


@dataclass(frozen=True, slots=True)
class Product:
    """A weight's panels and its bias, padded with zeros to complete panels. All matmuls of a layer have one kind."""

    packed: torch.Tensor
    bias: torch.Tensor
    kind: KindName
    weight_format: int
    """A format of `weight_formats` for fp32, of `int8_tile` for int8."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's weights; `q_norm` and `k_norm` [head_dim] are both set or both None."""

    input_norm: torch.Tensor  # [hidden_size]
    qkv: Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Product
    post_attention_norm: torch.Tensor  # [hidden_size]
    gate_up: Product
    down: Product
    eps: float
    qk_eps: float
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """`hidden = hidden + attention(norm(hidden))`, then `hidden + mlp(norm(hidden))`."""

    weights: LayerWeights
    scoring: Scoring
    rotates: bool
    """True if queries and keys are rotated."""


def describe(record: Any, layer: DecoderLayer) -> None:
    """Fill a record of LAYER, which only holds addresses; the caller keeps the layer alive."""
    weights, scoring = layer.weights, layer.scoring
    for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm"):
        tensor = getattr(weights, name)
        assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
        record[name] = 0 if tensor is None else tensor.data_ptr()
    for name in ("qkv", "o", "gate_up", "down"):
        product: Product = getattr(weights, name)
        assert product.kind == weights.qkv.kind
        record[name], record[f"{name}_bias"] = product.packed.data_ptr(), product.bias.data_ptr()
        record[f"{name}_format"] = product.weight_format
    for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "eps", "qk_eps"):
        record[name] = getattr(weights, name)
    record["hidden_size"] = len(weights.input_norm)
    for name, per_head in (("slopes", scoring.alibi_slopes), ("sinks", scoring.sinks)):
        assert per_head is None or (per_head.dtype == torch.float32 and per_head.is_contiguous())
        record[name] = 0 if per_head is None else per_head.data_ptr()
    record["window"], record["softcap"] = scoring.sliding_window or 0, scoring.softcap or 0.0
    record["scale"], record["rotates"] = scoring.scale, layer.rotates


def point_at(record: Any, cache: LayerCache) -> None:
    """Store the addresses of this cache in a record of LAYER; the caller keeps the cache alive."""
    assert all(tensor.is_contiguous() for tensor in cache.tensors())
    for name, tensor in (
        ("key_cache", cache.keys),
        ("value_cache", cache.values),
        ("key_scales", cache.key_scales),
        ("value_scales", cache.value_scales),
    ):
        record[name] = 0 if tensor is None else tensor.data_ptr()
    record["block_size"], record["group"] = cache.block_size, cache.group
    record["limit"] = largest_number(cache.keys.dtype) or 0.0
