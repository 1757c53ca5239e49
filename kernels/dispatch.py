"""The operators that the engine calls. Each picks its face by the device of its tensors.

CUDA tensors go to the Triton kernels, CPU tensors to `pagemill.kernels.cpu.operators`, or to the plain torch reference
where the CPU face's JIT library is not installed. Faces load on first use: a machine without triton never imports it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, Protocol

import torch

from pagemill.kernels.experts import Routing
from pagemill.kernels.types.layer_cache import LayerCache, as_bytes
from pagemill.kernels.types.low_rank import AdapterRows, LowRankTable
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.rotation import Rotation
from pagemill.kernels.types.sampling_rows import SamplingRows
from pagemill.kernels.types.scaled_rows import ScaledRows
from pagemill.kernels.types.scoring import Scoring
from pagemill.kernels.types.tiled_weight import TiledWeight

FaceName = Literal["triton", "cpu", "reference"]


class _ReshapeAndCache(Protocol):
    def __call__(
        self, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
    ) -> None: ...


class _PagedAttention(Protocol):
    def __call__(
        self, query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
    ) -> torch.Tensor: ...


class _CopyBlocks(Protocol):
    def __call__(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
    ) -> None: ...


class _RmsNorm(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class _AddRmsNorm(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class _SiluAndMul(Protocol):
    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class _RotaryAndCache(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation,
        cache: LayerCache,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor: ...


class _SampleTokens(Protocol):
    def __call__(
        self, logits: torch.Tensor, peaks: torch.Tensor, rows: SamplingRows, *, has_filters: bool
    ) -> torch.Tensor: ...


class _GroupedMatmul(Protocol):
    def __call__(self, x: torch.Tensor, weight: TiledWeight) -> torch.Tensor: ...


class _QuantiseRows(Protocol):
    def __call__(self, x: torch.Tensor, numbers: torch.dtype) -> ScaledRows: ...


class _NormAndQuantise(Protocol):
    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        numbers: torch.dtype,
        keeps: bool,
    ) -> tuple[ScaledRows, torch.Tensor]: ...


class _SiluAndQuantise(Protocol):
    def __call__(self, gate_up: torch.Tensor, numbers: torch.dtype, keeps: bool) -> ScaledRows: ...


class _ScaledMatmul(Protocol):
    def __call__(self, rows: ScaledRows, weight: ScaledRows, bias: torch.Tensor | None) -> torch.Tensor: ...


class _AddLowRank(Protocol):
    def __call__(
        self, out: torch.Tensor, x: torch.Tensor, table: LowRankTable, rows: AdapterRows
    ) -> None: ...


class _Route(Protocol):
    def __call__(
        self, logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class _ClampedSwiglu(Protocol):
    def __call__(self, gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor: ...


class _SortByExpert(Protocol):
    def __call__(
        self, x: torch.Tensor, indices: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


class _CombineExperts(Protocol):
    def __call__(self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Face:
    reshape_and_cache: _ReshapeAndCache
    paged_attention: _PagedAttention
    copy_blocks: _CopyBlocks
    rms_norm: _RmsNorm
    add_rms_norm: _AddRmsNorm
    silu_and_mul: _SiluAndMul
    rotary_and_cache: _RotaryAndCache
    sample_tokens: _SampleTokens
    grouped_matmul: _GroupedMatmul
    quantise_rows: _QuantiseRows
    norm_and_quantise: _NormAndQuantise
    silu_and_quantise: _SiluAndQuantise
    scaled_matmul: _ScaledMatmul
    add_low_rank: _AddLowRank
    route: _Route
    clamped_swiglu: _ClampedSwiglu
    sort_by_expert: _SortByExpert
    combine_experts: _CombineExperts


_override: ContextVar[FaceName | None] = ContextVar("kernel_face", default=None)


@contextmanager
def override(face: FaceName) -> Iterator[None]:
    """Use one face whatever the device, in this thread or task: for tests and comparisons.

    "triton" on CPU tensors needs TRITON_INTERPRET=1, set before the kernels are imported.
    """
    token = _override.set(face)
    try:
        yield
    finally:
        _override.reset(token)


@cache
def _load(face: FaceName) -> _Face:
    from pagemill.kernels import experts, reference, row_scaled

    plain = _Face(
        reference.reshape_and_cache,
        reference.paged_attention,
        reference.copy_blocks,
        reference.rms_norm,
        reference.add_rms_norm,
        reference.silu_and_mul,
        reference.rotary_and_cache,
        reference.sample_tokens,
        reference.grouped_matmul,
        row_scaled.quantise_rows,
        row_scaled.norm_and_quantise,
        row_scaled.silu_and_quantise,
        row_scaled.scaled_matmul,
        reference.add_low_rank,
        experts.route,
        experts.clamped_swiglu,
        experts.sort_by_expert,
        experts.combine_experts,
    )
    if face == "triton":
        from pagemill.kernels.gpu.attention import paged_attention
        from pagemill.kernels.gpu.cache import reshape_and_cache
        from pagemill.kernels.gpu.copy_blocks import copy_blocks
        from pagemill.kernels.gpu.grouped_matmul import grouped_matmul
        from pagemill.kernels.gpu.low_rank import add_low_rank
        from pagemill.kernels.gpu.norm import add_rms_norm, norm_and_quantise, rms_norm
        from pagemill.kernels.gpu.quantise import quantise_rows, silu_and_quantise
        from pagemill.kernels.gpu.rotary_cache import rotary_and_cache
        from pagemill.kernels.gpu.sampling import sample_tokens
        from pagemill.kernels.gpu.scaled_matmul import scaled_matmul
        from pagemill.kernels.gpu.silu import silu_and_mul

        return replace(
            plain,
            reshape_and_cache=reshape_and_cache,
            paged_attention=paged_attention,
            copy_blocks=copy_blocks,
            rms_norm=rms_norm,
            add_rms_norm=add_rms_norm,
            silu_and_mul=silu_and_mul,
            rotary_and_cache=rotary_and_cache,
            sample_tokens=sample_tokens,
            grouped_matmul=grouped_matmul,
            quantise_rows=quantise_rows,
            norm_and_quantise=norm_and_quantise,
            silu_and_quantise=silu_and_quantise,
            scaled_matmul=scaled_matmul,
            add_low_rank=add_low_rank,
        )
    if face == "cpu":
        # Whoever builds for the CPU fuses more than these operators do: see `pagemill.kernels.cpu.fused_rows`.
        from pagemill.kernels.cpu import operators as cpu
        from pagemill.kernels.cpu.experts import rows

        return replace(
            plain,
            reshape_and_cache=cpu.reshape_and_cache,
            paged_attention=cpu.paged_attention,
            copy_blocks=cpu.copy_blocks,
            silu_and_mul=cpu.silu_and_mul,
            add_low_rank=cpu.add_low_rank,
            route=rows.route,
            clamped_swiglu=rows.clamped_swiglu,
            sort_by_expert=rows.sort_by_expert,
            combine_experts=rows.combine_experts,
        )
    return plain


@cache
def _default_face(device_type: str) -> FaceName:
    if device_type == "cuda":
        return "triton"
    if device_type == "cpu" and importlib.util.find_spec("numba") is not None:
        return "cpu"
    return "reference"


def _face(tensor: torch.Tensor) -> _Face:
    return _load(_override.get() or _default_face(tensor.device.type))


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
) -> None:
    """Write every token's key and value to its slot of one layer's cache.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim]; views with any strides over a contiguous last
            dimension. Converted to the cache's dtype; for int8 and fp8 quantised per token and head, to nearest.
        slot_mapping: [num_tokens] int64, block id * block_size + offset; -1 skips the token. No slot twice.
    """
    assert key.stride(-1) == 1
    assert value.stride(-1) == 1
    _face(key).reshape_and_cache(key, value, cache, slot_mapping)


def paged_attention(
    query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
) -> torch.Tensor:
    """Causal attention of one step's tokens over one layer's paged cache: softmax over the visible keys' scores.

    Unused blocks, unused slots and block-table entries past a row's length, or wholly before what its window shows
    any query token, are never read.

    Args:
        query: [num_tokens, num_heads, head_dim], last dimension contiguous; num_heads is a multiple of
            num_kv_heads, and consecutive heads share a KV head.
        cache: with this step's keys and values already written; its block_size is a power of two.

    Returns:
        [num_tokens, num_heads, head_dim], fresh and contiguous. What stands at padded tokens is undefined.
    """
    assert query.stride(-1) == 1
    assert query.shape[1] % cache.num_kv_heads == 0
    return _face(query).paged_attention(query, cache, metadata, scoring)


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy blocks (source, destination) within one layer's caches, in place.

    Pairs never chain: no block is the destination of one pair and the source or destination of another.
    """
    _face(key_cache).copy_blocks(as_bytes(key_cache), as_bytes(value_cache), block_pairs)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight over the last dimension of x [num_rows, size], fresh.

    Computed in fp32 and rounded once. The last dimension is contiguous; weight is [size].
    """
    assert x.stride(-1) == 1
    return _face(x).rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both fresh and contiguous; the norm is the rounded sum's."""
    assert x.stride(-1) == residual.stride(-1) == 1
    return _face(x).add_rms_norm(x, residual, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [num_rows, 2 * size], the gate first; fresh, [num_rows, size]."""
    assert gate_up.stride(-1) == 1
    return _face(gate_up).silu_and_mul(gate_up)


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotation of queries and keys as `rotation` says, and `reshape_and_cache` of keys and values.

    Args:
        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; views with any
            strides over a contiguous last dimension. The keys are rounded to their own dtype before the cache's.

    Returns:
        The queries for attention, [num_tokens, num_heads, head_dim], fresh and contiguous.
    """
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    return _face(query).rotary_and_cache(query, key, value, rotation, cache, slot_mapping)


def sample_tokens(
    logits: torch.Tensor, peaks: torch.Tensor, rows: SamplingRows, *, has_filters: bool
) -> torch.Tensor:
    """Draw one token per row: argmax of (logit - peak) / temperature + Gumbel noise over what the filters keep.

    The filters are top-k, top-p and min-p, each of what the one before has left; ties with the last token kept are
    kept. The noise is `pagemill.kernels.noise`'s, so a row's token depends on its logits and its own entry alone; faces
    agree unless two tokens are within rounding of each other. A row with NaN gives some valid id.

    Args:
        logits: [num_rows, vocab_size] fp32, the last dimension contiguous. Not changed.
        peaks: [num_rows] fp32, each row's largest logit.
        has_filters: whether any row has one; without, none is looked at.

    Returns:
        [num_rows] int64.
    """
    assert logits.dtype is peaks.dtype is torch.float32
    assert logits.stride(-1) == 1
    return _face(logits).sample_tokens(logits, peaks, rows, has_filters=has_filters)


def grouped_matmul(x: torch.Tensor, weight: TiledWeight) -> torch.Tensor:
    """x W^T for x [num_rows, in_features], its numbers in the weight's order; fresh, [num_rows, out_features].

    Computed in fp32 from x and the weight's own numbers, and rounded once. The last dimension of x is contiguous.
    """
    assert x.stride(-1) == 1
    return _face(x).grouped_matmul(x, weight)


def quantise_rows(x: torch.Tensor, numbers: torch.dtype) -> ScaledRows:
    """x [num_rows, size] in int8 or e4m3, each row with a scale; `pagemill.kernels.row_scaled` defines every bit.

    The last dimension of x is contiguous.
    """
    assert x.stride(-1) == 1
    return _face(x).quantise_rows(x, numbers)


def norm_and_quantise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    numbers: torch.dtype,
    keeps: bool,
) -> tuple[ScaledRows, torch.Tensor]:
    """`rms_norm`, or `add_rms_norm` with a residual, and its rows quantised; also the sum, or x without a residual.

    Args:
        keeps: `ScaledRows.kept` has the norm.
    """
    assert x.stride(-1) == 1
    assert residual is None or residual.stride(-1) == 1
    return _face(x).norm_and_quantise(x, residual, weight, eps, numbers, keeps)


def silu_and_quantise(gate_up: torch.Tensor, numbers: torch.dtype, keeps: bool) -> ScaledRows:
    """`silu_and_mul` and its rows quantised. `keeps`: `ScaledRows.kept` has what `silu_and_mul` gives."""
    assert gate_up.stride(-1) == 1
    return _face(gate_up).silu_and_quantise(gate_up, numbers, keeps)


def scaled_matmul(rows: ScaledRows, weight: ScaledRows, bias: torch.Tensor | None) -> torch.Tensor:
    """(rows W^T * the weight's scales * the rows' scales) + bias, [num_rows, out_features] of the rows' dtype.

    Sums of int8 numbers are exact, those of e4m3 numbers fp32 in any order; each scale is then multiplied with one
    rounding in fp32.

    Args:
        weight: [out_features, in_features], of the rows' kind of numbers.
        bias: [out_features], of any dtype.
    """
    assert rows.numbers.is_contiguous()
    assert weight.numbers.is_contiguous()
    assert rows.numbers.dtype is weight.numbers.dtype
    return _face(rows.numbers).scaled_matmul(rows, weight, bias)


def add_low_rank(out: torch.Tensor, x: torch.Tensor, table: LowRankTable, rows: AdapterRows) -> None:
    """Add what each row's adapter changes: out[r] += x[r] A^T B, with A and B those of `rows.slots[r]`, per part.

    Rows without an adapter are not touched. Computed in fp32 and rounded once.

    Args:
        out: [num_rows, out_features]; x: [num_rows, in_features], of one dtype, the last dimensions contiguous.
        table: has matrices of the same dtype in every slot that a row names.
    """
    assert out.stride(-1) == x.stride(-1) == 1
    assert out.dtype is x.dtype
    assert len(out) == len(x) == len(rows.slots)
    _face(x).add_low_rank(out, x, table, rows)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each row's experts by its logits [num_rows, num_experts], and weigh them.

    Args:
        bias: [num_experts], added to the scores for the choice, not for the weights.

    Returns:
        Weights fp32 [num_rows, top_k], and experts int64 [num_rows, top_k], the best first.
    """
    assert logits.stride(-1) == 1
    return _face(logits).route(logits, bias, routing)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), the gate at most `limit`, up within -limit .. limit: gpt-oss's.

    Args:
        gate_up: [num_rows, 2 * size], the gate first.

    Returns:
        [num_rows, size], fresh; computed in fp32 and rounded once.
    """
    assert gate_up.stride(-1) == 1
    return _face(gate_up).clamped_swiglu(gate_up, alpha, limit)


def sort_by_expert(
    x: torch.Tensor, indices: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy rows of x [num_rows, size] for each expert that they chose, sorted by expert.

    Args:
        indices: int64 [num_rows, top_k], each in 0 .. num_experts - 1.

    Returns:
        Rows [num_rows * top_k, size]; the place of every choice among them, int64 [num_rows * top_k]; and int64
        [num_experts + 1], where each expert's rows begin.
    """
    assert x.stride(-1) == 1
    return _face(x).sort_by_expert(x, indices, num_experts)


def combine_experts(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [num_rows, size]: the sum of each row's experts, weighted, in the order of its choice.

    Args:
        rows: [num_rows * top_k, size], contiguous, sorted as by `sort_by_expert`, which gives `places`.
        weights: [num_rows, top_k].
    """
    assert rows.is_contiguous()
    return _face(rows).combine_experts(rows, places, weights)
