"""The recurrences of `pagemill.kernels.recurrence`: one pass over a head's state per token, in its slot.

A task is one head of one row. It processes the state in tiles that stay in the L1 cache for all of the row's
tokens. The results therefore do not depend on the prompt's chunk boundaries.
"""

from __future__ import annotations

import numpy as np
import torch

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import f32_pointer, i64_pointer, jit, run_rows
from pagemill.kernels.cpu.jit.row import F32, LOG2_E, ONE, VECTOR, ZERO
from pagemill.kernels.cpu.jit.threads import launch_rows
from pagemill.kernels.recurrence import NORM_EPS

_EPS = np.float32(NORM_EPS)
_WIDE = 4 * VECTOR


def gated_delta_rule(
    states: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    slots: torch.Tensor,
    *,
    is_new: bool,
) -> torch.Tensor:
    """See `pagemill.kernels.recurrence.gated_delta_rule`."""
    num_rows, length, heads, value_dim = value.shape
    key_heads, key_dim = key.shape[2:]
    given = [each.contiguous() for each in (query, key, value, decay, beta)]
    out = torch.empty(value.shape)
    addresses = (states.data_ptr(), *(each.data_ptr() for each in given), slots.data_ptr(), out.data_ptr())
    sizes = (length, heads, key_heads, key_dim, value_dim, int(is_new))
    run_rows(delta_parallel, num_rows * heads, length * key_dim * value_dim, addresses + sizes)
    return out


def state_space_scan(
    states: torch.Tensor,
    x: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    slots: torch.Tensor,
    *,
    is_new: bool,
) -> torch.Tensor:
    """See `pagemill.kernels.recurrence.state_space_scan`."""
    num_rows, length, heads, head_dim = x.shape
    groups, state_size = write.shape[2:]
    given = [each.contiguous() for each in (x, steps, decay, write, read)]
    out = torch.empty(x.shape)
    addresses = (states.data_ptr(), *(each.data_ptr() for each in given), slots.data_ptr(), out.data_ptr())
    sizes = (length, heads, groups, head_dim, state_size, decay.shape[1], int(is_new))
    run_rows(scan_parallel, num_rows * heads, length * head_dim * state_size, addresses + sizes)
    return out


@jit
def clear(target, size):
    for i in range(size):
        f32_pointer(target)[i] = ZERO


@jit
def inverse_length(source, size):
    """1 / sqrt(the sum of the squares)."""
    whole = F32 * size // VECTOR * VECTOR
    squares = vector.splat(ZERO)
    for at in range(0, whole, VECTOR):
        a = vector.load(source + at)
        squares = vector.multiply_add(a, a, squares)
    total = vector.sum_lanes(squares)
    for i in range(whole // F32, size):
        total += f32_pointer(source)[i] * f32_pointer(source)[i]
    return ONE / np.sqrt(total + _EPS)


@jit
def delta_wide(state, stride, key, query, value, out, key_dim, remains, beta, key_factor, query_factor):
    """Advance 64 columns of a head's state [key_dim, value_dim] by one token; the state and `stride` in bytes."""
    zero = vector.splat(ZERO)
    sum0, sum1, sum2, sum3 = zero, zero, zero, zero
    row = state
    for i in range(key_dim):
        k = vector.splat(f32_pointer(key)[i])
        sum0 = vector.multiply_add(vector.load(row), k, sum0)
        sum1 = vector.multiply_add(vector.load(row + VECTOR), k, sum1)
        sum2 = vector.multiply_add(vector.load(row + 2 * VECTOR), k, sum2)
        sum3 = vector.multiply_add(vector.load(row + 3 * VECTOR), k, sum3)
        row += stride
    kept, by = vector.splat(remains), vector.splat(beta)
    found = vector.splat(remains * key_factor)
    change0 = vector.multiply(by, vector.subtract(vector.load(value), vector.multiply(found, sum0)))
    change1 = vector.multiply(by, vector.subtract(vector.load(value + VECTOR), vector.multiply(found, sum1)))
    change2 = vector.multiply(
        by, vector.subtract(vector.load(value + 2 * VECTOR), vector.multiply(found, sum2))
    )
    change3 = vector.multiply(
        by, vector.subtract(vector.load(value + 3 * VECTOR), vector.multiply(found, sum3))
    )
    out0, out1, out2, out3 = zero, zero, zero, zero
    row = state
    for i in range(key_dim):
        k, q = vector.splat(f32_pointer(key)[i] * key_factor), vector.splat(f32_pointer(query)[i])
        s0 = vector.multiply_add(k, change0, vector.multiply(kept, vector.load(row)))
        s1 = vector.multiply_add(k, change1, vector.multiply(kept, vector.load(row + VECTOR)))
        s2 = vector.multiply_add(k, change2, vector.multiply(kept, vector.load(row + 2 * VECTOR)))
        s3 = vector.multiply_add(k, change3, vector.multiply(kept, vector.load(row + 3 * VECTOR)))
        vector.store(row, s0)
        vector.store(row + VECTOR, s1)
        vector.store(row + 2 * VECTOR, s2)
        vector.store(row + 3 * VECTOR, s3)
        out0, out1 = vector.multiply_add(s0, q, out0), vector.multiply_add(s1, q, out1)
        out2, out3 = vector.multiply_add(s2, q, out2), vector.multiply_add(s3, q, out3)
        row += stride
    by = vector.splat(query_factor)
    vector.store(out, vector.multiply(by, out0))
    vector.store(out + VECTOR, vector.multiply(by, out1))
    vector.store(out + 2 * VECTOR, vector.multiply(by, out2))
    vector.store(out + 3 * VECTOR, vector.multiply(by, out3))


@jit
def delta_narrow(state, stride, key, query, value, out, key_dim, remains, beta, key_factor, query_factor):
    """`delta_wide` for one column."""
    total = ZERO
    for i in range(key_dim):
        total += f32_pointer(state + i * stride)[0] * f32_pointer(key)[i]
    change = beta * (f32_pointer(value)[0] - remains * key_factor * total)
    total = ZERO
    for i in range(key_dim):
        s = remains * f32_pointer(state + i * stride)[0] + f32_pointer(key)[i] * key_factor * change
        f32_pointer(state + i * stride)[0] = s
        total += s * f32_pointer(query)[i]
    f32_pointer(out)[0] = query_factor * total


@jit
def delta_rows(
    first, last, states, query, key, value, decay, beta, slots, out, length, heads, key_heads, key_dim, value_dim,
    is_new,
):  # fmt: skip
    """Run tasks first .. last - 1. A task is (row, head)."""
    scale, stride = ONE / np.sqrt(np.float32(key_dim)), F32 * value_dim
    for task in range(first, last):
        row, head = task // heads, task % heads
        key_head = head // (heads // key_heads)
        state = states + F32 * (i64_pointer(slots)[row] * heads + head) * key_dim * value_dim
        if is_new:
            clear(state, key_dim * value_dim)
        column = 0
        while column < value_dim:
            is_wide = F32 * (value_dim - column) >= _WIDE
            for token in range(row * length, (row + 1) * length):
                place = token * heads + head
                k = key + F32 * (token * key_heads + key_head) * key_dim
                q = query + F32 * (token * key_heads + key_head) * key_dim
                v, o = value + F32 * (place * value_dim + column), out + F32 * (place * value_dim + column)
                remains, by = np.exp(f32_pointer(decay)[place]), f32_pointer(beta)[place]
                of_key, of_query = inverse_length(k, key_dim), scale * inverse_length(q, key_dim)
                at = state + F32 * column
                if is_wide:
                    delta_wide(at, stride, k, q, v, o, key_dim, remains, by, of_key, of_query)
                else:
                    delta_narrow(at, stride, k, q, v, o, key_dim, remains, by, of_key, of_query)
            column += _WIDE // F32 if is_wide else 1


@jit
def scan_one(state, write, read, size, remains, x):
    """Advance one line of a head's state [size] by a token; return its dot product with `read`."""
    whole = F32 * size // VECTOR * VECTOR
    kept, added, sums = vector.splat(remains), vector.splat(x), vector.splat(ZERO)
    for at in range(0, whole, VECTOR):
        s = vector.multiply_add(
            added, vector.load(write + at), vector.multiply(kept, vector.load(state + at))
        )
        vector.store(state + at, s)
        sums = vector.multiply_add(s, vector.load(read + at), sums)
    total = vector.sum_lanes(sums)
    for i in range(whole // F32, size):
        s = remains * f32_pointer(state)[i] + x * f32_pointer(write)[i]
        f32_pointer(state)[i] = s
        total += s * f32_pointer(read)[i]
    return total


@jit
def scan_places(state, write, read, size, step, decay, x):
    """`scan_one` with a separate decay for each element."""
    whole = F32 * size // VECTOR * VECTOR
    by, added, sums = vector.splat(step * LOG2_E), vector.splat(x), vector.splat(ZERO)
    for at in range(0, whole, VECTOR):
        kept = vector.exp2(vector.multiply(by, vector.load(decay + at)))
        s = vector.multiply_add(
            added, vector.load(write + at), vector.multiply(kept, vector.load(state + at))
        )
        vector.store(state + at, s)
        sums = vector.multiply_add(s, vector.load(read + at), sums)
    total = vector.sum_lanes(sums)
    for i in range(whole // F32, size):
        s = np.exp(step * f32_pointer(decay)[i]) * f32_pointer(state)[i] + x * f32_pointer(write)[i]
        f32_pointer(state)[i] = s
        total += s * f32_pointer(read)[i]
    return total


@jit
def scan_rows(
    first, last, states, x, steps, decay, write, read, slots, out, length, heads, groups, head_dim, state_size,
    decay_size, is_new,
):  # fmt: skip
    """Run tasks first .. last - 1. A task is (row, head)."""
    for task in range(first, last):
        row, head = task // heads, task % heads
        group = head // (heads // groups)
        state = states + F32 * (i64_pointer(slots)[row] * heads + head) * head_dim * state_size
        if is_new:
            clear(state, head_dim * state_size)
        for token in range(row * length, (row + 1) * length):
            place, shared = token * heads + head, F32 * (token * groups + group) * state_size
            step, decays = f32_pointer(steps)[place], decay + F32 * head * decay_size
            remains = np.exp(step * f32_pointer(decays)[0])
            source, target = x + F32 * place * head_dim, out + F32 * place * head_dim
            for i in range(head_dim):
                line = state + F32 * i * state_size
                taken = step * f32_pointer(source)[i]
                if decay_size == 1:
                    result = scan_one(line, write + shared, read + shared, state_size, remains, taken)
                else:
                    result = scan_places(line, write + shared, read + shared, state_size, step, decays, taken)
                f32_pointer(target)[i] = result


@jit
def delta_parallel(num_threads, num_rows, *arguments):
    launch_rows(delta_rows, num_threads, num_rows, arguments)


@jit
def scan_parallel(num_threads, num_rows, *arguments):
    launch_rows(scan_rows, num_threads, num_rows, arguments)
