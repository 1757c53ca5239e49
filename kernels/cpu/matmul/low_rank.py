"""Matmuls with the low-rank matrices of adapters, in fp32; each row can use a different adapter.

A decode row reads each of its adapter's matrices once, as a stream. Consecutive rows of one adapter find them
in the cache. The order of a row's sums does not depend on the other rows.
"""

from __future__ import annotations

import torch

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import (
    f32_pointer,
    i32_pointer,
    i64_pointer,
    jit,
    run_rows,
)
from pagemill.kernels.cpu.jit.row import F32, VECTOR, ZERO
from pagemill.kernels.cpu.jit.threads import launch_rows
from pagemill.kernels.types.low_rank import ENTRY_NUMBERS, NO_ADAPTER, AdapterRows, LowRankTable

I64 = 8


def add_low_rank(out: torch.Tensor, x: torch.Tensor, table: LowRankTable, rows: AdapterRows) -> None:
    """See `pagemill.kernels.dispatch.add_low_rank`. fp32 only."""
    assert out.dtype is x.dtype is torch.float32
    assert table.entries.stride(2) == 1
    assert table.entries.stride(1) == ENTRY_NUMBERS
    num_rows, in_features = x.shape
    products = torch.empty(num_rows, table.max_rank)
    arguments = (
        out.data_ptr(),
        out.stride(0),
        x.data_ptr(),
        x.stride(0),
        in_features,
        rows.slots.data_ptr(),
        table.entries.data_ptr(),
        table.entries.stride(0),
        table.starts.data_ptr(),
        table.num_parts,
        products.data_ptr(),
        table.max_rank,
    )
    run_rows(low_rank_parallel, num_rows, in_features + out.shape[1], arguments)


def warm_up() -> None:
    """Compile the kernel, or load it from disk, before a step needs it."""
    table = LowRankTable.of_widths(torch.zeros(1, 1, ENTRY_NUMBERS, dtype=torch.int64), [64], 1)
    x, slots = torch.zeros(1, 64), torch.full((1,), NO_ADAPTER, dtype=torch.int32)
    add_low_rank(x, x.clone(), table, AdapterRows(slots, slots[:0], slots[:0]))


@jit
def shrink(target, source, matrix, rank, size):
    """target[j] = dot product of `source` [size] and row j of `matrix` [rank, size]; four rows at a time."""
    whole, stride = F32 * size // VECTOR * VECTOR, F32 * size
    fours = rank // 4 * 4
    for j in range(0, fours, 4):
        a = matrix + j * stride
        b, c, d = a + stride, a + 2 * stride, a + 3 * stride
        sum_a, sum_b, sum_c, sum_d = (
            vector.splat(ZERO),
            vector.splat(ZERO),
            vector.splat(ZERO),
            vector.splat(ZERO),
        )
        for at in range(0, whole, VECTOR):
            x = vector.load(source + at)
            sum_a = vector.multiply_add(vector.load(a + at), x, sum_a)
            sum_b = vector.multiply_add(vector.load(b + at), x, sum_b)
            sum_c = vector.multiply_add(vector.load(c + at), x, sum_c)
            sum_d = vector.multiply_add(vector.load(d + at), x, sum_d)
        f32_pointer(target)[j] = vector.sum_lanes(sum_a) + _rest(source, a, whole, size)
        f32_pointer(target)[j + 1] = vector.sum_lanes(sum_b) + _rest(source, b, whole, size)
        f32_pointer(target)[j + 2] = vector.sum_lanes(sum_c) + _rest(source, c, whole, size)
        f32_pointer(target)[j + 3] = vector.sum_lanes(sum_d) + _rest(source, d, whole, size)
    for j in range(fours, rank):
        a = matrix + j * stride
        sum_a = vector.splat(ZERO)
        for at in range(0, whole, VECTOR):
            sum_a = vector.multiply_add(vector.load(a + at), vector.load(source + at), sum_a)
        f32_pointer(target)[j] = vector.sum_lanes(sum_a) + _rest(source, a, whole, size)


@jit
def _rest(source, row, whole, size):
    """Dot product of the values that do not fill a vector."""
    total = ZERO
    for i in range(whole // F32, size):
        total += f32_pointer(source)[i] * f32_pointer(row)[i]
    return total


@jit
def expand(target, factors, matrix, rank, size):
    """target [size] += `factors` [rank] times `matrix` [rank, size]; four rows at a time."""
    whole, stride = F32 * size // VECTOR * VECTOR, F32 * size
    fours = rank // 4 * 4
    for j in range(0, fours, 4):
        a = matrix + j * stride
        b, c, d = a + stride, a + 2 * stride, a + 3 * stride
        p, q, r, s = (
            f32_pointer(factors)[j],
            f32_pointer(factors)[j + 1],
            f32_pointer(factors)[j + 2],
            f32_pointer(factors)[j + 3],
        )
        ps, qs, rs, ss = vector.splat(p), vector.splat(q), vector.splat(r), vector.splat(s)
        for at in range(0, whole, VECTOR):
            total = vector.multiply_add(vector.load(a + at), ps, vector.load(target + at))
            total = vector.multiply_add(vector.load(b + at), qs, total)
            total = vector.multiply_add(vector.load(c + at), rs, total)
            vector.store(target + at, vector.multiply_add(vector.load(d + at), ss, total))
        for i in range(whole // F32, size):
            f32_pointer(target)[i] += (
                p * f32_pointer(a)[i] + q * f32_pointer(b)[i] + r * f32_pointer(c)[i] + s * f32_pointer(d)[i]
            )
    for j in range(fours, rank):
        a = matrix + j * stride
        p = f32_pointer(factors)[j]
        ps = vector.splat(p)
        for at in range(0, whole, VECTOR):
            vector.store(target + at, vector.multiply_add(vector.load(a + at), ps, vector.load(target + at)))
        for i in range(whole // F32, size):
            f32_pointer(target)[i] += p * f32_pointer(a)[i]


@jit
def low_rank_rows(
    first, last, out, out_stride, x, x_stride, in_features, slots, entries, slot_stride, starts, num_parts,
    products, max_rank,
):  # fmt: skip
    for row in range(first, last):
        slot = i32_pointer(slots)[row]
        if slot >= 0:
            source, target = x + F32 * row * x_stride, out + F32 * row * out_stride
            small = products + F32 * row * max_rank
            for part in range(num_parts):
                entry = entries + I64 * (slot * slot_stride + ENTRY_NUMBERS * part)
                rank = i64_pointer(entry)[2]
                if rank > 0:
                    begin, end = i64_pointer(starts)[part], i64_pointer(starts)[part + 1]
                    shrink(small, source, i64_pointer(entry)[0], rank, in_features)
                    expand(target + F32 * begin, small, i64_pointer(entry)[1], rank, end - begin)


@jit
def low_rank_parallel(num_threads, num_rows, *arguments):
    launch_rows(low_rank_rows, num_threads, num_rows, arguments)
