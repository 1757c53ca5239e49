"""The operators that the engine calls. Each runs on the backend for the device of its tensors.

CUDA tensors use the Triton kernels, CPU tensors the numba kernels, and all others the plain torch reference,
whose functions document the operators. A backend loads on first use, so a machine without triton never
imports it. An operator that a backend does not have falls back to the reference.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from pagemill.kernels import experts, recurrence, reference, row_scaled
from pagemill.kernels.types.layer_cache import LayerCache, as_bytes
from pagemill.kernels.types.low_rank import AdapterRows, LowRankTable
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.sampling_rows import SamplingRows
from pagemill.kernels.types.scaled_rows import ScaledRows
from pagemill.kernels.types.scoring import Scoring

FaceName = Literal["triton", "cpu", "reference"]
P = ParamSpec("P")
R = TypeVar("R")

_MODULES: dict[FaceName, dict[str, tuple[str, ...]]] = {
    "triton": {
        "gpu.attention": ("paged_attention",),
        "gpu.cache": ("reshape_and_cache",),
        "gpu.copy_blocks": ("copy_blocks",),
        "gpu.expert_matmul": ("expert_matmul",),
        "gpu.experts": ("clamped_swiglu", "combine_experts", "sort_by_expert"),
        "gpu.grouped_matmul": ("grouped_matmul",),
        "gpu.low_rank": ("add_low_rank",),
        "gpu.norm": ("add_rms_norm", "norm_and_quantize", "rms_norm"),
        "gpu.quantize": ("quantize_rows", "silu_and_quantize"),
        "gpu.recurrence": ("gated_delta_rule", "state_space_scan"),
        "gpu.route": ("route",),
        "gpu.rotary_cache": ("rotary_and_cache",),
        "gpu.sampling": ("sample_tokens",),
        "gpu.scaled_matmul": ("scaled_matmul",),
        "gpu.silu": ("silu_and_mul",),
    },
    # The engine fuses more than these for the CPU: see `pagemill.kernels.cpu.fused_rows`.
    "cpu": {
        "cpu.operators": (
            "reshape_and_cache", "paged_attention", "copy_blocks", "silu_and_mul", "add_low_rank",
        ),
        "cpu.recurrence": ("gated_delta_rule", "state_space_scan"),
        "cpu.experts.rows": ("route", "clamped_swiglu", "sort_by_expert", "combine_experts"),
    },
    "reference": {},
}  # fmt: skip
"""The modules of each backend and the operators that they replace."""

Observer = Callable[[str, Callable[..., Any], Callable[..., Any], Any, Any], Any]
"""Called in place of a backend's operator with (name, operator, its reference, args, kwargs); returns the result."""

_observer: ContextVar[Observer | None] = ContextVar("kernel_observer", default=None)
_replaced: set[str] = set()
_override: ContextVar[FaceName | None] = ContextVar("kernel_face", default=None)


@contextmanager
def override(face: FaceName) -> Iterator[None]:
    """Use one backend regardless of the device, in this thread or task: for tests and comparisons.

    "triton" on CPU tensors needs TRITON_INTERPRET=1, set before the kernels are imported.
    """
    token = _override.set(face)
    try:
        yield
    finally:
        _override.reset(token)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Pass the calls of all backends' operators through `observer`, in this thread or task."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def replace_by_reference(name: str) -> None:
    """Compute an operator in plain torch from now on, for the lifetime of the process."""
    _replaced.add(name)


def replaced() -> list[str]:
    """Return the operators that plain torch computes in place of a kernel."""
    return sorted(_replaced)


@cache
def _load(face: FaceName) -> dict[str, Callable[..., Any]]:
    """Import a backend and return its operators by name."""
    return {
        name: getattr(importlib.import_module(f"pagemill.kernels.{module}"), name)
        for module, names in _MODULES[face].items()
        for name in names
    }


@cache
def _default_face(device_type: str) -> FaceName:
    if device_type == "cuda":
        return "triton"
    if device_type == "cpu" and importlib.util.find_spec("numba") is not None:
        return "cpu"
    return "reference"


def _tensor(argument: Any) -> torch.Tensor:
    tensor: torch.Tensor = argument.numbers if isinstance(argument, ScaledRows) else argument
    return tensor


def _dispatched(
    plain: Callable[P, R], num_strided: int = 1, accepts: Callable[P, bool] = lambda *_, **__: True
) -> Callable[P, R]:
    """Return the operator that `plain` defines: it runs on the backend of its first argument's device.

    Args:
        num_strided: kernels read this many of the first arguments by their strides; their last dimension must be
            contiguous.
        accepts: whether the arguments meet the kernels' other requirements.
    """
    name = plain.__name__

    @wraps(plain)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        tensors = [_tensor(argument) for argument in args[:num_strided] if argument is not None]
        assert all(tensor.stride(-1) == 1 for tensor in tensors), "the last dimension must be contiguous"
        assert accepts(*args, **kwargs), f"{name} does not accept these arguments"
        face = _override.get() or _default_face(tensors[0].device.type)
        operator: Callable[P, R] = plain if name in _replaced else _load(face).get(name, plain)
        observe = _observer.get()
        if observe is None or operator is plain:
            return operator(*args, **kwargs)
        result: R = observe(name, operator, plain, args, kwargs)
        return result

    return run


def _has_whole_groups(
    query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
) -> bool:
    return query.shape[1] % cache.num_kv_heads == 0


def _is_fp32(logits: torch.Tensor, peaks: torch.Tensor, rows: SamplingRows, *, has_filters: bool) -> bool:
    return logits.dtype is peaks.dtype is torch.float32


def _rows_match(out: torch.Tensor, x: torch.Tensor, table: LowRankTable, rows: AdapterRows) -> bool:
    return out.dtype is x.dtype and len(out) == len(x) == len(rows.slots)


def _is_whole(rows: ScaledRows, weight: ScaledRows, bias: torch.Tensor | None) -> bool:
    one, other = rows.numbers, weight.numbers
    return one.is_contiguous() and other.is_contiguous() and one.dtype is other.dtype


def _is_stacked(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    biases = weight if bias is None else bias
    return weight.is_contiguous() and biases.is_contiguous() and rows.dtype is weight.dtype


def _is_contiguous(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> bool:
    return rows.is_contiguous()


def _has_fp32_states(states: torch.Tensor, *given: torch.Tensor, is_new: bool) -> bool:
    *numbers, slots = given
    is_fp32 = all(each.dtype is torch.float32 for each in (states, *numbers))
    return is_fp32 and states.is_contiguous() and slots.dtype is torch.int64


reshape_and_cache = _dispatched(reference.reshape_and_cache, num_strided=2)
paged_attention = _dispatched(reference.paged_attention, accepts=_has_whole_groups)
rms_norm = _dispatched(reference.rms_norm)
add_rms_norm = _dispatched(reference.add_rms_norm, num_strided=2)
silu_and_mul = _dispatched(reference.silu_and_mul)
rotary_and_cache = _dispatched(reference.rotary_and_cache, num_strided=3)
sample_tokens = _dispatched(reference.sample_tokens, accepts=_is_fp32)
grouped_matmul = _dispatched(reference.grouped_matmul)
add_low_rank = _dispatched(reference.add_low_rank, num_strided=2, accepts=_rows_match)
quantize_rows = _dispatched(row_scaled.quantize_rows)
norm_and_quantize = _dispatched(row_scaled.norm_and_quantize, num_strided=2)
silu_and_quantize = _dispatched(row_scaled.silu_and_quantize)
scaled_matmul = _dispatched(row_scaled.scaled_matmul, num_strided=2, accepts=_is_whole)
route = _dispatched(experts.route)
clamped_swiglu = _dispatched(experts.clamped_swiglu)
sort_by_expert = _dispatched(experts.sort_by_expert)
expert_matmul = _dispatched(experts.expert_matmul, num_strided=2, accepts=_is_stacked)
combine_experts = _dispatched(experts.combine_experts, accepts=_is_contiguous)
gated_delta_rule = _dispatched(recurrence.gated_delta_rule, accepts=_has_fp32_states)
state_space_scan = _dispatched(recurrence.state_space_scan, accepts=_has_fp32_states)
_copy_blocks = _dispatched(reference.copy_blocks)


@wraps(reference.copy_blocks)
def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
) -> None:
    _copy_blocks(as_bytes(key_cache), as_bytes(value_cache), block_pairs)
