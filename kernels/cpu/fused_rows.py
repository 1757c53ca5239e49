"""Row-wise operators of a transformer layer, each in one pass over its tensors instead of torch's several.

All require fp32 CPU tensors with a contiguous last dimension and any leading strides. A row's result does not
depend on the other rows.
"""

from __future__ import annotations

import numpy as np
import torch

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import external, f32_pointer, jit, run_rows
from pagemill.kernels.cpu.jit.row import F32, LOG2_E, ONE, VECTOR, ZERO
from pagemill.kernels.cpu.jit.threads import launch_rows

LOWEST_GATE = np.float32(-87.0)  # exp(87) is about the largest fp32 value; silu is 0 long before


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + eps) * weight, over the last dimension of x [num_tokens, size]. `out` may be x."""
    num_tokens, size = x.shape
    out = torch.empty((num_tokens, size)) if out is None else out
    addresses = (x.data_ptr(), weight.data_ptr(), 0, 0, out.data_ptr())
    strides = (x.stride(0), 0, out.stride(0))
    run_rows(rms_norm_parallel, num_tokens, size, (*addresses, *strides, size, eps))
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both new and contiguous."""
    num_tokens, size = x.shape
    normed, total = torch.empty((num_tokens, size)), torch.empty((num_tokens, size))
    addresses = (
        x.data_ptr(),
        weight.data_ptr(),
        residual.data_ptr(),
        total.data_ptr(),
        normed.data_ptr(),
    )
    strides = (x.stride(0), residual.stride(0), size)
    run_rows(rms_norm_parallel, num_tokens, size, (*addresses, *strides, size, eps))
    return normed, total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for gate_up [num_tokens, 2 * size], the gate first."""
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size))
    arguments = (gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), size)
    run_rows(silu_and_mul_parallel, num_tokens, size, arguments)
    return out


def rotary_embedding(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate query and key [num_tokens, heads, head_dim] in place, pairing value i with i + half ("neox").

    cos and sin are [num_tokens, rotary_dim] in the transformers layout: the second half repeats the first.
    Values from rotary_dim stay unchanged.
    """
    num_tokens, rotary_dim = cos.shape
    angles = (cos.data_ptr(), sin.data_ptr(), cos.stride(0), sin.stride(0), rotary_dim // 2)
    for x in (query, key):
        arguments = (x.data_ptr(), x.stride(0), x.stride(1), x.shape[1], *angles)
        run_rows(rotate_parallel, num_tokens, x.shape[1] * rotary_dim, arguments)


@external
def rms_norm_rows(
    first, last, x, weight, residual, total, out, x_stride, residual_stride, out_stride, size, eps
):
    """Rows first .. last - 1 of both norms; a `residual` of address 0 is absent. `total` has the stride of `out`."""
    whole = F32 * size // VECTOR * VECTOR
    for row in range(first, last):
        source, target = x + F32 * row * x_stride, out + F32 * row * out_stride
        if residual != 0:
            term, source_sum = residual + F32 * row * residual_stride, total + F32 * row * out_stride
            for at in range(0, whole, VECTOR):
                vector.store(source_sum + at, vector.add(vector.load(source + at), vector.load(term + at)))
            for i in range(whole // F32, size):
                f32_pointer(source_sum)[i] = f32_pointer(source)[i] + f32_pointer(term)[i]
            source = source_sum
        squares0, squares1 = vector.splat(ZERO), vector.splat(ZERO)
        for at in range(0, whole - VECTOR, 2 * VECTOR):
            a, b = vector.load(source + at), vector.load(source + at + VECTOR)
            squares0, squares1 = vector.multiply_add(a, a, squares0), vector.multiply_add(b, b, squares1)
        if whole // VECTOR % 2 == 1:
            a = vector.load(source + whole - VECTOR)
            squares0 = vector.multiply_add(a, a, squares0)
        squares = vector.sum_lanes(vector.add(squares0, squares1))
        for i in range(whole // F32, size):
            squares += f32_pointer(source)[i] * f32_pointer(source)[i]
        factor = ONE / np.sqrt(squares / np.float32(size) + np.float32(eps))
        factors = vector.splat(factor)
        for at in range(0, whole, VECTOR):
            normed = vector.multiply(vector.load(source + at), factors)
            vector.store(target + at, vector.multiply(normed, vector.load(weight + at)))
        for i in range(whole // F32, size):
            f32_pointer(target)[i] = f32_pointer(source)[i] * factor * f32_pointer(weight)[i]


@jit
def silu_times(gate, up):
    """silu(gate) * up of two vectors."""
    power = vector.exp2(
        vector.multiply(vector.maximum(gate, vector.splat(LOWEST_GATE)), vector.splat(-LOG2_E))
    )
    return vector.multiply(vector.divide(gate, vector.add(vector.splat(ONE), power)), up)


@jit
def silu_and_mul_rows(first, last, gate_up, stride, out, size):
    whole = F32 * size // VECTOR * VECTOR
    for row in range(first, last):
        gate, target = gate_up + F32 * row * stride, out + F32 * row * size
        up = gate + F32 * size
        for at in range(0, whole, VECTOR):
            vector.store(target + at, silu_times(vector.load(gate + at), vector.load(up + at)))
        for i in range(whole // F32, size):
            value = f32_pointer(gate)[i]
            power = np.exp2(max(value, LOWEST_GATE) * -LOG2_E)
            f32_pointer(target)[i] = value / (ONE + power) * f32_pointer(up)[i]


@jit
def rotate_rows(first, last, x, row_stride, head_stride, num_heads, cos, sin, cos_stride, sin_stride, half):
    whole, other = F32 * half // VECTOR * VECTOR, F32 * half
    for row in range(first, last):
        c, s = cos + F32 * row * cos_stride, sin + F32 * row * sin_stride
        for head in range(num_heads):
            target = x + F32 * (row * row_stride + head * head_stride)
            for at in range(0, whole, VECTOR):
                a, b = vector.load(target + at), vector.load(target + other + at)
                cosine, sine = vector.load(c + at), vector.load(s + at)
                low = vector.subtract(vector.multiply(a, cosine), vector.multiply(b, sine))
                vector.store(target + at, low)
                vector.store(target + other + at, vector.multiply_add(b, cosine, vector.multiply(a, sine)))
            for i in range(whole // F32, half):
                a, b = f32_pointer(target)[i], f32_pointer(target)[half + i]
                cosine, sine = f32_pointer(c)[i], f32_pointer(s)[i]
                f32_pointer(target)[i] = a * cosine - b * sine
                f32_pointer(target)[half + i] = b * cosine + a * sine


@jit
def rms_norm_parallel(num_threads, num_rows, *arguments):
    launch_rows(rms_norm_rows, num_threads, num_rows, arguments)


@jit
def silu_and_mul_parallel(num_threads, num_rows, *arguments):
    launch_rows(silu_and_mul_rows, num_threads, num_rows, arguments)


@jit
def rotate_parallel(num_threads, num_rows, *arguments):
    launch_rows(rotate_rows, num_threads, num_rows, arguments)
