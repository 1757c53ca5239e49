"""A whole decoder layer in machine code: norm, attention over the paged cache, norm, gated MLP.

Called operator by operator, a layer of a small model spends a third of a decode step in Python and in fetching
memory for results. Here the operators of `cpu_matmul` or `cpu_int8_matmul`, `cpu_fused`, `cpu_cache` and the attention
kernels call one another in machine code, on buffers that all layers share. Numbers are the same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import prange, types
from numba.extending import overload

from kernels import cpu_int8_matmul, cpu_matmul
from kernels import cpu_vector as vector
from kernels.cpu_attention_decode import decode
from kernels.cpu_attention_prefill import prefill
from kernels.cpu_cache import write_tokens
from kernels.cpu_element import ELEMENTS
from kernels.cpu_fused import (
    rms_norm_parallel,
    rms_norm_rows,
    rotate_rows,
    silu_and_mul_parallel,
    silu_and_mul_rows,
)
from kernels.cpu_jit import NUMBERS_PER_THREAD, f32_pointer, jit, use_torch_threads
from kernels.cpu_row import F32, VECTOR, ZERO, fill
from kernels.layer_cache import LayerCache, allocate_layer, largest_number
from kernels.metadata import AttentionMetadata, warm_up_metadata
from kernels.scoring import Scoring

MLP_ROWS = 512
"""The MLP runs over so many tokens at a time: its intermediate results stay small, and in the cache."""

# A scalar whose numba type stands for how a layer's weights are packed: each kind compiles when it is first used.
_KINDS: dict[torch.dtype, Any] = {torch.float32: np.float32(0), torch.uint8: np.uint8(0)}

_ADDRESS = np.int64
_LAYER = np.dtype(
    [
        *((name, _ADDRESS) for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm")),
        *((name, _ADDRESS) for name in ("qkv", "qkv_bias", "o", "o_bias")),
        *((name, _ADDRESS) for name in ("gate_up", "gate_up_bias", "down", "down_bias")),
        *((name, _ADDRESS) for name in ("key_cache", "value_cache", "key_scales", "value_scales", "slopes")),
        *((name, np.int64) for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")),
        *((name, np.int64) for name in ("head_dim", "block_size", "window")),
        *((name, np.float64) for name in ("eps", "qk_eps", "scale", "softcap")),
        ("limit", np.float32),
    ]
)
_STEP = np.dtype(
    [
        *((name, _ADDRESS) for name in ("slot_mapping", "block_tables", "query_start_loc", "seq_lens")),
        *((name, np.int64) for name in ("block_table_stride", "num_rows", "num_decode_rows", "num_tokens")),
        *((name, np.int64) for name in ("num_padded", "max_seq_len")),
        *((name, _ADDRESS) for name in ("normed", "qkv", "attended", "gate_up", "gated")),
    ]
)


@dataclass(frozen=True, slots=True)
class Product:
    """A weight as `cpu_matmul.pack` (fp32) or `cpu_int8_matmul.pack` (uint8) makes it, and its bias.

    The bias is padded with zeros to whole panels. A layer's products are all of one kind.
    """

    packed: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a layer is made of; `q_norm` and `k_norm` [head_dim] come together or not at all."""

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
    """What all layers of a model share within a step: its metadata's addresses, and room for their results.

    Grows to the largest step seen. For one thread at a time.
    """

    def __init__(self) -> None:
        self.record = np.zeros(1, _STEP)
        self._metadata: AttentionMetadata | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self, metadata: AttentionMetadata, num_tokens: int, weights: LayerWeights) -> None:
        """Point at a step's tensors; nothing to do where they are pointed at already."""
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
        step["max_seq_len"] = metadata.max_seq_len
        heads, head_dim = weights.num_heads, weights.head_dim
        mlp_rows = min(num_tokens, MLP_ROWS)
        self._reserve("normed", num_tokens * max(len(weights.input_norm), heads * head_dim))
        self._reserve("qkv", num_tokens * (heads + 2 * weights.num_kv_heads) * head_dim)
        self._reserve("attended", num_tokens * heads * head_dim)
        self._reserve("gate_up", mlp_rows * 2 * weights.intermediate_size)
        self._reserve("gated", mlp_rows * weights.intermediate_size)

    def _reserve(self, name: str, count: int) -> None:
        tensor = self._tensors.get(name)
        if tensor is None or len(tensor) < count:
            self._tensors[name] = tensor = torch.empty(count)
        self.record[0][name] = tensor.data_ptr()


class DecoderLayer:
    """One layer's operator: `hidden = hidden + attention(norm(hidden))`, then `hidden + mlp(norm(hidden))`."""

    def __init__(self, weights: LayerWeights, scoring: Scoring, buffers: StepBuffers) -> None:
        slopes = scoring.alibi_slopes
        assert slopes is None or (slopes.dtype == torch.float32 and slopes.is_contiguous())
        self._weights, self._slopes = weights, slopes  # kept: the record holds addresses only
        self._buffers = buffers
        self._cache: LayerCache | None = None
        self._element = ELEMENTS[torch.float32]
        self._record = np.zeros(1, _LAYER)
        layer = self._record[0]
        for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm"):
            tensor = getattr(weights, name)
            assert tensor is None or (tensor.dtype == torch.float32 and tensor.is_contiguous())
            layer[name] = 0 if tensor is None else tensor.data_ptr()
        self._kind = _KINDS[weights.qkv.packed.dtype]
        for name in ("qkv", "o", "gate_up", "down"):
            product: Product = getattr(weights, name)
            assert product.packed.dtype == weights.qkv.packed.dtype
            layer[name], layer[f"{name}_bias"] = product.packed.data_ptr(), product.bias.data_ptr()
        for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "eps", "qk_eps"):
            layer[name] = getattr(weights, name)
        layer["hidden_size"] = len(weights.input_norm)
        layer["slopes"] = 0 if slopes is None else slopes.data_ptr()
        layer["window"], layer["softcap"] = scoring.sliding_window or 0, scoring.softcap or 0.0
        layer["scale"] = scoring.scale

    def run(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> None:
        """Replace `hidden` [num_tokens, hidden_size], fp32 and contiguous, by the layer's output.

        `rotation`: cos and sin [num_tokens, rotary_dim] as `cpu_fused.rotary_embedding` takes them; None = the
        layer rotates nothing.
        """
        assert hidden.dtype is torch.float32
        assert hidden.is_contiguous()
        if cache is not self._cache:
            self._point_at(cache)
        self._buffers.begin(metadata, len(hidden), self._weights)
        cos, sin, stride, half = 0, 0, 0, 0
        if rotation is not None:
            assert rotation[0].stride() == rotation[1].stride()
            cos, sin = rotation[0].data_ptr(), rotation[1].data_ptr()
            stride, half = rotation[0].stride(0), rotation[0].shape[1] // 2
        # Three calls, so that the products are not compiled anew for every dtype of the cache, nor attention for
        # every kind of product.
        num_threads, address = use_torch_threads(), hidden.data_ptr()
        layer, step = self._record, self._buffers.record
        _project(self._kind, layer, step, address, num_threads)
        _place_and_attend(self._element, layer, step, cos, sin, stride, half, num_threads)
        _finish(self._kind, layer, step, address, num_threads)

    def warm_up(self, block_size: int, cache_dtype: torch.dtype) -> None:
        """Compile the layer for a cache of this dtype, or load it from the disk."""
        weights = self._weights
        cache = allocate_layer(1, weights.num_kv_heads, block_size, weights.head_dim, cache_dtype)
        hidden, angles = torch.zeros(3, len(weights.input_norm)), torch.zeros(3, weights.head_dim)
        self.run(hidden, (angles, angles), cache, warm_up_metadata())

    def _point_at(self, cache: LayerCache) -> None:
        assert all(tensor.is_contiguous() for tensor in cache.tensors())
        self._cache, self._element = cache, ELEMENTS[cache.keys.dtype]
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


def _multiply(kind, *arguments):
    """`multiply_parallel` of the module that packs weights of this kind; for compiled callers alone."""
    raise NotImplementedError


@overload(_multiply)
def _choose_product(kind, *arguments):
    # Chosen while compiling, not by a branch: nobody compiles products of a kind that their model does not have.
    module = cpu_int8_matmul if kind == types.uint8 else cpu_matmul
    multiply_parallel = module.multiply_parallel

    def run(kind, *arguments):
        multiply_parallel(*arguments)

    return run


@jit
def _share(num_threads, num_numbers):
    return max(1, min(num_threads, num_numbers // NUMBERS_PER_THREAD))


@jit
def _norm(num_threads, num_rows, x, weight, residual, total, out, size, eps):
    if num_threads > 1:
        rms_norm_parallel(num_threads, num_rows, x, weight, residual, total, out, size, size, size, size, eps)
    else:
        rms_norm_rows(0, num_rows, x, weight, residual, total, out, size, size, size, size, eps)


@jit
def _norm_heads(x, num_heads, head_dim, weight, eps):
    rms_norm_rows(0, num_heads, x, weight, 0, 0, x, head_dim, 0, head_dim, head_dim, eps)


@jit
def _place_tokens(first, last, element, layer, step, cos, sin, stride, half):
    """Norm and rotate the tokens' queries and keys, and write keys and values to the cache."""
    heads, kv_heads, head_dim = layer[0].num_heads, layer[0].num_kv_heads, layer[0].head_dim
    row = (heads + 2 * kv_heads) * head_dim
    key, value = F32 * heads * head_dim, F32 * (heads + kv_heads) * head_dim
    for token in range(first, last):
        query = step[0].qkv + F32 * token * row
        if layer[0].q_norm != 0:
            _norm_heads(query, heads, head_dim, layer[0].q_norm, layer[0].qk_eps)
            _norm_heads(query + key, kv_heads, head_dim, layer[0].k_norm, layer[0].qk_eps)
        if half != 0:  # keys follow the queries: they are rotated together
            at = F32 * token * stride
            rotate_rows(
                0, 1, query, row, head_dim, heads + kv_heads, cos + at, sin + at, stride, stride, half
            )
    write_tokens(
        first, last, element, step[0].qkv + key, row, head_dim, step[0].qkv + value, row, head_dim,
        layer[0].key_cache, layer[0].value_cache, layer[0].key_scales, layer[0].value_scales,
        layer[0].limit, step[0].slot_mapping, kv_heads, layer[0].block_size, head_dim,
    )  # fmt: skip


@jit(parallel=True)
def _place(num_threads, element, layer, step, cos, sin, stride, half):
    num_tokens = step[0].num_tokens
    for thread in prange(num_threads):
        first, last = num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads
        _place_tokens(first, last, element, layer, step, cos, sin, stride, half)


@jit
def _attend(element, layer, step, num_threads):
    heads, kv_heads, head_dim = layer[0].num_heads, layer[0].num_kv_heads, layer[0].head_dim
    group, row = heads // kv_heads, (heads + 2 * kv_heads) * head_dim
    if step[0].num_decode_rows > 0:
        decode(
            step[0].attended, step[0].qkv, row, head_dim, element, layer[0].key_cache, layer[0].value_cache,
            layer[0].key_scales, layer[0].value_scales, step[0].block_tables, step[0].block_table_stride,
            step[0].seq_lens, step[0].num_decode_rows, kv_heads, group, head_dim, layer[0].block_size,
            step[0].max_seq_len, layer[0].scale, layer[0].window, layer[0].softcap, layer[0].slopes, num_threads,
        )  # fmt: skip
    if step[0].num_decode_rows < step[0].num_rows:
        prefill(
            step[0].attended, step[0].qkv, row, head_dim, element, layer[0].key_cache, layer[0].value_cache,
            layer[0].key_scales, layer[0].value_scales, step[0].block_tables, step[0].block_table_stride,
            step[0].query_start_loc, step[0].seq_lens, step[0].num_decode_rows, step[0].num_rows,
            step[0].num_tokens, kv_heads, group, head_dim, layer[0].block_size, layer[0].scale,
            layer[0].window, layer[0].softcap, layer[0].slopes, num_threads,
        )  # fmt: skip
    if step[0].num_padded > 0:
        used = step[0].num_tokens - step[0].num_padded
        fill(step[0].attended + F32 * used * heads * head_dim, step[0].num_padded * heads * head_dim, ZERO)


@jit
def _gate(num_threads, num_rows, gate_up, out, size):
    if num_threads > 1:
        silu_and_mul_parallel(num_threads, num_rows, gate_up, 2 * size, out, size)
    else:
        silu_and_mul_rows(0, num_rows, gate_up, 2 * size, out, size)


@jit
def _add(target, source, count):
    whole = F32 * count // VECTOR * VECTOR
    for at in range(0, whole, VECTOR):
        vector.store(target + at, vector.add(vector.load(target + at), vector.load(source + at)))
    for i in range(whole // F32, count):
        f32_pointer(target)[i] = f32_pointer(target)[i] + f32_pointer(source)[i]


@jit
def _mlp(kind, hidden, layer, step, num_threads):
    """hidden += down(silu(gate) * up) of `normed`, whose rows take the products' results in turn."""
    size, inner, num_tokens = layer[0].hidden_size, layer[0].intermediate_size, step[0].num_tokens
    for begin in range(0, num_tokens, MLP_ROWS):
        num_rows, at = min(MLP_ROWS, num_tokens - begin), F32 * begin * size
        normed = step[0].normed + at
        _multiply(
            kind, step[0].gate_up, normed, size, layer[0].gate_up, layer[0].gate_up_bias, num_rows, 2 * inner,
            size, num_threads,
        )  # fmt: skip
        _gate(_share(num_threads, num_rows * inner), num_rows, step[0].gate_up, step[0].gated, inner)
        _multiply(
            kind, normed, step[0].gated, inner, layer[0].down, layer[0].down_bias, num_rows, size, inner,
            num_threads,
        )  # fmt: skip
        _add(hidden + at, normed, num_rows * size)


@jit
def _project(kind, layer, step, hidden, num_threads):
    """qkv = product of the normed hidden states."""
    size, num_tokens = layer[0].hidden_size, step[0].num_tokens
    row = (layer[0].num_heads + 2 * layer[0].num_kv_heads) * layer[0].head_dim
    shares = _share(num_threads, num_tokens * size)
    _norm(shares, num_tokens, hidden, layer[0].input_norm, 0, 0, step[0].normed, size, layer[0].eps)
    _multiply(
        kind, step[0].qkv, step[0].normed, size, layer[0].qkv, layer[0].qkv_bias, num_tokens, row, size,
        num_threads,
    )  # fmt: skip


@jit
def _place_and_attend(element, layer, step, cos, sin, stride, half, num_threads):
    """attended = attention over the cache, this step's keys and values included."""
    row = (layer[0].num_heads + 2 * layer[0].num_kv_heads) * layer[0].head_dim
    shares = _share(num_threads, step[0].num_tokens * row)
    _place(shares, element, layer, step, cos, sin, stride, half)
    _attend(element, layer, step, num_threads)


@jit
def _finish(kind, layer, step, hidden, num_threads):
    """hidden += product of what was attended to, then hidden += mlp of that."""
    size, num_tokens = layer[0].hidden_size, step[0].num_tokens
    width, normed = layer[0].num_heads * layer[0].head_dim, step[0].normed
    _multiply(
        kind,
        normed,
        step[0].attended,
        width,
        layer[0].o,
        layer[0].o_bias,
        num_tokens,
        size,
        width,
        num_threads,
    )
    # The sum goes to `hidden`, its norm to `normed`: every number is read before its place is written.
    shares = _share(num_threads, num_tokens * size)
    _norm(
        shares, num_tokens, normed, layer[0].post_attention_norm, hidden, hidden, normed, size, layer[0].eps
    )
    _mlp(kind, hidden, layer, step, num_threads)
