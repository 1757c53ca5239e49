"""Matmuls of rows sorted by expert with each expert's packed weight: y = x W_e^T + b_e.

Threads take an expert's rows and some of its panels at a time. `fp32` or `converted` computes each value of
the result, so it depends only on its row, expert and channel, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from pagemill.kernels.cpu.jit.compiler import i64_pointer, jit, use_torch_threads
from pagemill.kernels.cpu.jit.row import F32, line_in
from pagemill.kernels.cpu.jit.threads import launch
from pagemill.kernels.cpu.matmul import bf16, converted, fp32, int8, weight_packing
from pagemill.kernels.cpu.matmul.fp32_panel import Strided, Weight, num_panels_of
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.cpu.matmul.kinds import KINDS, KindName, by_kind
from pagemill.kernels.cpu.matmul.weight_packing import PackedWeight
from pagemill.kernels.cpu.matmul.work_sharing import new_counter, take

_TURNS = 4  # per thread, at least
_multiply_range = by_kind(fp32.multiply_range, converted.multiply_range)


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """The packed weights of all experts in one format, expert by expert."""

    kind: KindName
    panels: torch.Tensor
    """[num_experts * panels of each, ...]"""
    weight_format: int
    bias: torch.Tensor
    """fp32 [num_experts, panels of each * PANEL], or [1, ...] for all"""
    num_experts: int
    out_features: int
    in_features: int

    @classmethod
    def of_floats(cls, packed: PackedWeight, bias: torch.Tensor, num_experts: int) -> GroupedWeights:
        sizes = (num_experts, packed.out_features, packed.in_features)
        return cls("fp32", packed.panels, packed.weight_format, bias, *sizes)


def padded_bias(bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    """Return biases [num_experts, out_features] padded to complete panels; for None, one row of zeros."""
    width = -(-out_features // PANEL) * PANEL
    if bias is None:
        return torch.zeros(1, width)
    return torch.nn.functional.pad(bias.float(), (0, width - out_features)).contiguous()


def multiply(x: torch.Tensor, offsets: torch.Tensor, weights: GroupedWeights) -> torch.Tensor:
    """Multiply rows offsets[e] .. offsets[e + 1] - 1 of x by the weight of expert e.

    Args:
        x: fp32 [num_rows, in_features], the last dimension contiguous.
        offsets: int64 [num_experts + 1], from 0 to num_rows.

    Returns:
        fp32 [num_rows, out_features], new and contiguous.
    """
    assert x.dtype is torch.float32
    assert x.stride(1) == 1 or x.shape[1] == 1
    assert x.shape[1] == weights.in_features
    assert offsets.dtype is torch.int64
    assert len(offsets) == weights.num_experts + 1
    out = torch.empty(len(x), weights.out_features)
    panels, bias = weights.panels, weights.bias
    addresses = (
        panels.data_ptr(),
        panels.nbytes // weights.num_experts,
        weights.weight_format,
        bias.data_ptr(),
        F32 * bias.stride(0) if len(bias) > 1 else 0,
    )
    sizes = (weights.num_experts, weights.out_features, weights.in_features)
    rows = (out.data_ptr(), x.data_ptr(), x.stride(0), offsets.data_ptr())
    _multiply_parallel(KINDS[weights.kind], *rows, addresses, sizes, use_torch_threads())
    return out


@cache
def warm_up(kind: KindName) -> None:
    """Compile the kernel, or load it from disk, before a step needs it."""
    one, bias = torch.zeros(1, 1), padded_bias(None, 1)
    if kind == "fp32":
        weights = GroupedWeights.of_floats(weight_packing.pack(one), bias, 1)
    else:
        packed = {"int8": int8, "bf16": bf16}[kind].pack(one)
        weights = GroupedWeights(kind, packed.panels, packed.weight_format, bias, 1, 1, 1)
    multiply(torch.zeros(1, 1), torch.tensor([0, 1]), weights)


@jit(allocates=True)
def _with_rows(offsets, num_experts):
    """Return the experts that have rows."""
    found, count = np.empty(num_experts, np.int64), 0
    for expert in range(num_experts):
        if i64_pointer(offsets)[expert + 1] > i64_pointer(offsets)[expert]:
            found[count] = expert
            count += 1
    return found[:count]


@jit
def _take_parts(thread, kind, out, x, x_stride, offsets, addresses, sizes, experts, counter, num_threads):
    panels, expert_bytes, weight_format, bias, bias_stride = addresses
    _, out_features, in_features = sizes
    any_weight = Weight(panels, weight_format, bias, out_features, in_features)
    num_panels, num_experts = num_panels_of(any_weight), len(experts)
    parts = 1
    if num_threads > 1 and num_experts > 0:
        parts = min(num_panels, (_TURNS * num_threads + num_experts - 1) // num_experts)
    turn = take(line_in(counter))
    while turn < num_experts * parts:
        expert, part = experts[turn // parts], turn % parts
        low, high = i64_pointer(offsets)[expert], i64_pointer(offsets)[expert + 1]
        weight = Weight(
            panels + expert_bytes * expert,
            weight_format,
            bias + bias_stride * expert,
            out_features,
            in_features,
        )
        target = Strided(out + F32 * out_features * low, F32 * out_features)
        source = Strided(x + F32 * x_stride * low, F32 * x_stride)
        first, last = num_panels * part // parts, num_panels * (part + 1) // parts
        _multiply_range(kind, first, last, target, source, high - low, weight)
        turn = take(line_in(counter))


@jit(allocates=True)
def _multiply_parallel(kind, out, x, x_stride, offsets, addresses, sizes, num_threads):
    experts, counter = _with_rows(offsets, sizes[0]), new_counter()
    arguments = (kind, out, x, x_stride, offsets, addresses, sizes, experts, counter, num_threads)
    launch(_take_parts, num_threads, arguments)
