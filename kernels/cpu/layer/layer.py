"""A whole decoder layer in machine code: norm, attention over the paged cache, norm, gated MLP.

Called operator by operator, a layer of a small model spends a third of a decode step in Python and in fetching
memory for results. Here the products, the row operators, the cache's writer and the attention kernels call one another
in machine code, on buffers that all layers share. Numbers are the same to the last bit.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from pagemill.kernels.cpu.attention.decode import decode
from pagemill.kernels.cpu.attention.prefill import prefill
from pagemill.kernels.cpu.attention.sharing import sharing_of
from pagemill.kernels.cpu.jit.compiler import use_torch_threads
from pagemill.kernels.cpu.jit.element import element_of
from pagemill.kernels.cpu.layer.steps import finish, place_and_attend, project
from pagemill.kernels.cpu.matmul.kinds import KINDS, KindName
from pagemill.kernels.cpu.matmul.work_sharing import BLOCK_ROWS
from pagemill.kernels.types.layer_cache import LayerCache, allocate_layer, largest_number
from pagemill.kernels.types.metadata import AttentionMetadata, warm_up_metadata
from pagemill.kernels.types.scoring import Scoring

_ADDRESS = np.int64
_LAYER = np.dtype(
    [
        *((name, _ADDRESS) for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm")),
        *((name, _ADDRESS) for name in ("qkv", "qkv_bias", "o", "o_bias")),
        *((name, _ADDRESS) for name in ("gate_up", "gate_up_bias", "down", "down_bias")),
        *((f"{name}_format", np.int64) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _ADDRESS) for name in ("key_cache", "value_cache", "key_scales", "value_scales")),
        *((name, _ADDRESS) for name in ("slopes", "sinks")),
        *((name, np.int64) for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")),
        *((name, np.int64) for name in ("head_dim", "block_size", "window")),
        *((name, np.float64) for name in ("eps", "qk_eps", "scale", "softcap")),
        ("limit", np.float32),
    ]
)
_STEP = np.dtype(
    [
        *((name, _ADDRESS) for name in ("slot_mapping", "block_tables", "query_start_loc", "seq_lens")),
        ("sharing", _ADDRESS),
        *((name, np.int64) for name in ("block_table_stride", "num_rows", "num_decode_rows", "num_tokens")),
        *((name, np.int64) for name in ("num_padded", "num_read")),
        *((name, _ADDRESS) for name in ("normed", "qkv", "attended", "gated", "read_tokens")),
    ]
)


@dataclass(frozen=True, slots=True)
class Product:
    """A weight's panels and its bias, padded with zeros to whole panels. A layer's products are all of one kind."""

    packed: torch.Tensor
    bias: torch.Tensor
    kind: KindName
    weight_format: int
    """Of `weight_formats` for fp32, of `int8_tile` for int8."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """A layer's weights; `q_norm` and `k_norm` [head_dim] are both given or both None."""

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


class StepBuffers:
    """The state that all layers share within a step: the metadata's addresses, and room for their results.

    Grows to the largest step seen. For one thread at a time.
    """

    def __init__(self) -> None:
        self.record = np.zeros(1, _STEP)
        self._metadata: AttentionMetadata | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self, metadata: AttentionMetadata, num_tokens: int, weights: LayerWeights) -> None:
        """Point at a step's tensors; nothing to do where they are pointed at already."""
        # A block of rows for each thread, or all rows where there are fewer.
        self._reserve(
            "gated", torch.get_num_threads() * min(num_tokens, BLOCK_ROWS) * weights.intermediate_size
        )
        if self._metadata is metadata:
            return
        tables = metadata.block_tables
        assert tables.stride(1) == 1
        assert tables.dtype == metadata.query_start_loc.dtype == metadata.seq_lens.dtype == torch.int32
        assert metadata.slot_mapping.dtype == torch.int64
        self._metadata = metadata
        step = self.record[0]
        step["slot_mapping"], step["block_tables"] = metadata.slot_mapping.data_ptr(), tables.data_ptr()
        step["query_start_loc"] = metadata.query_start_loc.data_ptr()
        step["seq_lens"] = metadata.seq_lens.data_ptr()
        step["block_table_stride"] = tables.stride(0)
        step["num_rows"], step["num_decode_rows"] = len(metadata.seq_lens_host), metadata.num_decode_rows
        step["num_tokens"], step["num_padded"] = num_tokens, num_tokens - sum(metadata.query_lens_host)
        step["sharing"] = sharing_of(metadata)
        heads, head_dim = weights.num_heads, weights.head_dim
        self._reserve("normed", num_tokens * max(len(weights.input_norm), heads * head_dim))
        qkv_size = (heads + 2 * weights.num_kv_heads) * head_dim
        self._reserve("qkv", num_tokens * max(len(weights.input_norm), qkv_size))
        self._reserve("attended", num_tokens * heads * head_dim)

    def read(self, num_tokens: int, tokens: torch.Tensor | None) -> None:
        """Say whose output is read: that of all `num_tokens`, or of these, which the caller keeps until then."""
        assert tokens is None or (tokens.dtype == torch.int64 and tokens.is_contiguous())
        step = self.record[0]
        step["num_read"] = num_tokens if tokens is None else len(tokens)
        step["read_tokens"] = 0 if tokens is None else tokens.data_ptr()

    def _reserve(self, name: str, count: int) -> None:
        tensor = self._tensors.get(name)
        if tensor is None or len(tensor) < count:
            self._tensors[name] = tensor = torch.empty(count)
        self.record[0][name] = tensor.data_ptr()


# Addresses of cos and sin, their rows' stride, and half of the rotary dimension.
Angles = tuple[int, int, int, int]
NO_ROTATION: Angles = (0, 0, 0, 0)


def angles_of(rotation: tuple[torch.Tensor, torch.Tensor]) -> Angles:
    """cos and sin [num_tokens, any], fp32, with one stride; the width of cos is the rotary dimension."""
    cos, sin = rotation
    assert cos.dtype is sin.dtype is torch.float32
    assert cos.stride() == sin.stride()
    return cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[1] // 2


# Three kernels, so that the products are not compiled anew for every dtype of the cache, nor attention for every kind
# of product; and the two that the second calls. What takes longest to compile comes first.
PARTS = ("prefill", "decode", "place_and_attend", "finish", "project")


def compile_part(name: str, *, kind: KindName, cache_dtype: torch.dtype) -> None:
    """Compile one of them, or load it from the disk."""
    number, element = KINDS[kind], element_of(cache_dtype, rounds=kind == "bf16")
    layer, step = np.zeros(1, _LAYER), np.zeros(1, _STEP)
    kernel, arguments = {
        "prefill": (prefill, _attention_arguments(prefill, element)),
        "decode": (decode, _attention_arguments(decode, element)),
        "project": (project, (number, layer, step, 0, 1)),
        "place_and_attend": (place_and_attend, (element, layer, step, *NO_ROTATION, 1)),
        "finish": (finish, (number, layer, step, 0, 1)),
    }[name]
    kernel.compile(tuple(map(numba.typeof, arguments)))


def _attention_arguments(kernel: Any, element: Any) -> tuple[Any, ...]:
    others = {"element": element, "scale": 0.0, "softcap": 0.0}
    return tuple(others.get(name, 0) for name in inspect.signature(kernel.py_func).parameters)


class DecoderLayer:
    """One layer's operator: `hidden = hidden + attention(norm(hidden))`, then `hidden + mlp(norm(hidden))`."""

    def __init__(self, weights: LayerWeights, scoring: Scoring, buffers: StepBuffers) -> None:
        self.weights, self._scoring = weights, scoring  # kept: the record holds addresses only
        self.buffers = buffers
        self._cache: LayerCache | None = None
        self._rounds = scoring.rounds_to_cache
        self._element = element_of(torch.float32)
        self._record = np.zeros(1, _LAYER)
        layer = self._record[0]
        for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm"):
            tensor = getattr(weights, name)
            assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
            layer[name] = 0 if tensor is None else tensor.data_ptr()
        self._kind: Any = KINDS[weights.qkv.kind]
        for name in ("qkv", "o", "gate_up", "down"):
            product: Product = getattr(weights, name)
            assert product.kind == weights.qkv.kind
            layer[name], layer[f"{name}_bias"] = product.packed.data_ptr(), product.bias.data_ptr()
            layer[f"{name}_format"] = product.weight_format
        for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "eps", "qk_eps"):
            layer[name] = getattr(weights, name)
        layer["hidden_size"] = len(weights.input_norm)
        for name, per_head in (("slopes", scoring.alibi_slopes), ("sinks", scoring.sinks)):
            assert per_head is None or (per_head.dtype == torch.float32 and per_head.is_contiguous())
            layer[name] = 0 if per_head is None else per_head.data_ptr()
        layer["window"], layer["softcap"] = scoring.sliding_window or 0, scoring.softcap or 0.0
        layer["scale"] = scoring.scale

    def run(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        cache: LayerCache,
        metadata: AttentionMetadata,
        read_tokens: torch.Tensor | None = None,
    ) -> None:
        """Replace `hidden` [num_tokens, hidden_size], fp32 and contiguous, by the layer's output.

        `read_tokens` [any] int64, ascending: the tokens whose output anyone reads; that of the others is undefined,
        but their keys and values reach the cache. None = all.

        `rotation`: cos and sin [num_tokens, rotary_dim] as `cpu_fused.rotary_embedding` takes them; None = the
        layer rotates nothing.
        """
        assert hidden.dtype is torch.float32
        assert hidden.is_contiguous()
        self.buffers.begin(metadata, len(hidden), self.weights)
        self.buffers.read(len(hidden), read_tokens)
        angles = NO_ROTATION if rotation is None else angles_of(rotation)
        self.compute(hidden.data_ptr(), angles, cache, use_torch_threads())

    def compute(self, hidden: int, angles: Angles, cache: LayerCache, num_threads: int) -> None:
        """`run` for hidden states at this address, once the buffers have been told of the step."""
        if cache is not self._cache:
            self._point_at(cache)
        layer, step = self._record, self.buffers.record
        project(self._kind, layer, step, hidden, num_threads)
        place_and_attend(self._element, layer, step, *angles, num_threads)
        finish(self._kind, layer, step, hidden, num_threads)

    def warm_up(self, block_size: int, cache_dtype: torch.dtype) -> None:
        """Compile the layer for a cache of this dtype, or load it from the disk."""
        weights = self.weights
        cache = allocate_layer(1, weights.num_kv_heads, block_size, weights.head_dim, cache_dtype)
        hidden, angles = torch.zeros(3, len(weights.input_norm)), torch.zeros(3, weights.head_dim)
        self.run(hidden, (angles, angles), cache, warm_up_metadata())

    def _point_at(self, cache: LayerCache) -> None:
        assert all(tensor.is_contiguous() for tensor in cache.tensors())
        self._cache, self._element = cache, element_of(cache.keys.dtype, rounds=self._rounds)
        layer = self._record[0]
        for name, tensor in (
            ("key_cache", cache.keys),
            ("value_cache", cache.values),
            ("key_scales", cache.key_scales),
            ("value_scales", cache.value_scales),
        ):
            layer[name] = 0 if tensor is None else tensor.data_ptr()
        layer["block_size"] = cache.block_size
        layer["limit"] = largest_number(cache.keys.dtype) or 0.0
