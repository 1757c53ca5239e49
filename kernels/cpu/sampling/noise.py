"""The draw of `pagemill.kernels.noise`, without computing noise for tokens that cannot win.

Gumbel noise is -ln(E) with E = -ln(1 - u) for a uniform u. The highest sum of logit and noise is therefore
the lowest E / p with p = exp(logit): a race of exponential clocks. u <= E <= 16.64 u for every possible u. A
token whose p / u is more than 16.64 times below another's has therefore lost, which needs no logarithm to
compute. The remaining tokens, about 20, get their noise from `gumbel_noise`, so the winner always matches the
definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import f32_pointer, i32_pointer, jit, run_rows
from pagemill.kernels.cpu.jit.row import F32, I32, LOG2_E, ZERO, address_of
from pagemill.kernels.cpu.jit.threads import launch_rows
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, emit_splat, f32x16
from pagemill.kernels.noise import argmax_of_sums, gumbel_noise

# Above 16.64 by far more than the rounding errors of logits, noise and their sums: ln(20 / 16.64) = 0.18.
_FURTHEST = np.float32(20.0)
# Candidates per row. Their number is a Poisson variable whose mean is 20 times an exponential one. In e^-50
# of the rows there are more; those are drawn from the complete row.
MOST_CANDIDATES = 1024
_BLOCK = 64  # tokens whose best score is stored
_MINUS_INFINITY = np.float32(-np.inf)

_ir = cgutils.ir
_I32X16 = _ir.VectorType(_ir.IntType(32), LANES)


def argmax_with_noise(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """See `pagemill.kernels.selection.argmax_with_noise`; fp32, last dimension contiguous."""
    assert logits.dtype is torch.float32
    assert logits.stride(1) == 1
    assert keys.dtype is torch.int32
    if len(logits) == 0:
        return torch.empty(0, dtype=torch.int64)
    size, keys = logits.shape[1], keys.contiguous()
    ids, counts = candidates(logits, keys)
    most = int(counts.amax())
    if most > MOST_CANDIDATES:
        return argmax_of_sums(logits, keys)
    ids = ids[:, :most]
    # A row's surplus slots repeat its first candidate.
    ids = torch.where(torch.arange(most) < counts[:, None], ids, ids[:, :1])
    sums = logits.gather(1, ids.long()) + gumbel_noise(keys, ids)
    is_highest = sums == sums.amax(dim=-1, keepdim=True)
    return torch.where(is_highest, ids, size - 1).amin(dim=-1).long()  # NaN never compares equal: any token


def candidates(logits: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that can win, int32 [num_rows, MOST_CANDIDATES], and their number per row, [num_rows].

    If there are more than MOST_CANDIDATES, some are missing.
    """
    num_rows, size = logits.shape
    ids = torch.empty((num_rows, MOST_CANDIDATES), dtype=torch.int32)
    counts = torch.empty(num_rows, dtype=torch.int32)
    arguments = (
        logits.data_ptr(),
        logits.stride(0),
        size,
        keys.data_ptr(),
        ids.data_ptr(),
        counts.data_ptr(),
    )
    run_rows(_find_candidates_parallel, num_rows, size, arguments)
    return ids, counts


def warm_up() -> None:
    """Compile the kernel, or load it from disk, before a step needs it."""
    argmax_with_noise(torch.zeros(1, _BLOCK), torch.zeros(1, dtype=torch.int32))


@intrinsic
def _uniforms(typing_context: Any, first: Any, key: Any) -> Any:
    """`gumbel_noise`'s uniform values of tokens first .. first + 15, before they are clamped below 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        def constant(value: int) -> Any:
            return _ir.Constant(_I32X16, [value] * LANES)

        def mix(x: Any) -> Any:
            for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
                x = builder.mul(builder.xor(x, builder.lshr(x, constant(shift))), constant(factor))
            return builder.xor(x, builder.lshr(x, constant(16)))

        first, key = (emit_splat(builder, number) for number in arguments)
        ids = builder.add(first, _ir.Constant(_I32X16, list(range(LANES))))
        bits = mix(builder.xor(builder.mul(ids, constant(0x9E3779B9)), key))
        bits = builder.and_(mix(builder.add(bits, key)), constant(0x7FFFFFFF))
        halves = builder.fadd(builder.sitofp(bits, F32X16), _ir.Constant(F32X16, [0.5] * LANES))
        return builder.fmul(halves, _ir.Constant(F32X16, [2.0**-31] * LANES))

    return f32x16(types.int32, types.int32), generate


@jit
def _scores(logits, first, key):
    """p / u of tokens first .. first + 15, whose logits are at the address `logits`."""
    p = vector.exp2(vector.multiply(vector.load(logits), vector.splat(LOG2_E)))
    return vector.divide(p, _uniforms(np.int32(first), key))


@jit
def _take(scores, first, last, limit, ids, count):
    """Append the tokens first .. last - 1 whose score reaches the limit; return the new number of candidates."""
    for lane in range(last - first):
        if f32_pointer(scores)[lane] >= limit:
            if count < MOST_CANDIDATES:
                i32_pointer(ids)[count] = first + lane
            count += 1
    return count


@jit(allocates=True)
def _find_candidates(first_row, last_row, logits, stride, size, keys, ids, counts):
    peaks = np.empty(size // _BLOCK + 1, np.float32)
    end, scores = np.full(LANES, _MINUS_INFINITY, np.float32), np.empty(LANES, np.float32)
    whole = size // LANES * LANES
    for row in range(first_row, last_row):
        source, key = logits + F32 * row * stride, i32_pointer(keys)[row]
        targets, count = ids + I32 * row * MOST_CANDIDATES, 0
        for i in range(size - whole):
            end[i] = f32_pointer(source)[whole + i]
        best = ZERO
        for block in range(0, whole, _BLOCK):
            maxima = vector.splat(ZERO)
            for at in range(block, min(block + _BLOCK, whole), LANES):
                maxima = vector.maximum(_scores(source + F32 * at, at, key), maxima)
            peaks[block // _BLOCK] = vector.max_lanes(maxima)
            best = max(best, peaks[block // _BLOCK])
        end_scores = _scores(address_of(end), whole, key)
        best = max(best, vector.max_lanes(end_scores))
        limit = best / _FURTHEST
        for block in range(0, whole, _BLOCK):
            if peaks[block // _BLOCK] >= limit:
                for at in range(block, min(block + _BLOCK, whole), LANES):
                    vector.store(address_of(scores), _scores(source + F32 * at, at, key))
                    count = _take(address_of(scores), at, at + LANES, limit, targets, count)
        vector.store(address_of(scores), end_scores)
        count = _take(address_of(scores), whole, size, limit, targets, count)
        if count == 0:  # a logit is not finite: use any token, because its request fails
            i32_pointer(targets)[0], count = 0, 1
        i32_pointer(counts)[row] = count


@jit
def _find_candidates_parallel(num_threads, num_rows, *arguments):
    launch_rows(_find_candidates, num_threads, num_rows, arguments)
