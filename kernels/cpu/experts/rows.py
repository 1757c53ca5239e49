"""Routing of rows to experts, and the copies before and after the experts' matmuls, in fp32.

Contracts: `pagemill.kernels.dispatch`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from pagemill.kernels import experts as reference
from pagemill.kernels.cpu import fused_rows
from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import f32_pointer, i64_pointer, jit, run_rows
from pagemill.kernels.cpu.jit.row import F32, LOG2_E, ONE, VECTOR, ZERO
from pagemill.kernels.cpu.jit.threads import launch_rows
from pagemill.kernels.experts import Routing

_SOFTMAX, _SIGMOID = 0, 1
_LOWEST = np.float32(-np.inf)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.dtype is not torch.float32 or (bias is not None and bias.dtype is not torch.float32):
        return reference.route(logits, bias, routing)
    num_rows, num_experts = logits.shape
    weights = torch.empty(num_rows, routing.top_k)
    indices = torch.empty(num_rows, routing.top_k, dtype=torch.int64)
    rows = (logits.data_ptr(), logits.stride(0), 0 if bias is None else bias.data_ptr())
    choice = (routing.num_groups, routing.kept_groups, routing.group_best, routing.top_k)
    kind = _SIGMOID if routing.scores == "sigmoid" else _SOFTMAX
    numbers = (kind, routing.normalizes, np.float32(routing.epsilon), np.float32(routing.scale))
    arguments = (weights.data_ptr(), indices.data_ptr(), rows, num_experts, choice, numbers)
    run_rows(_route_parallel, num_rows, num_experts * routing.top_k, arguments)
    return weights, indices


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    if gate_up.dtype is not torch.float32:
        return reference.clamped_swiglu(gate_up, alpha, limit)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size)
    arguments = (
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        size,
        np.float32(alpha),
        np.float32(limit),
    )
    run_rows(_clamped_parallel, num_rows, size, arguments)
    return out


def sort_by_expert(
    x: torch.Tensor, indices: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x.dtype is not torch.float32:
        return reference.sort_by_expert(x, indices, num_experts)
    indices = indices.contiguous()
    count, top_k, size = indices.numel(), indices.shape[1], x.shape[1]
    places = torch.empty(count, dtype=torch.int64)
    offsets = torch.empty(num_experts + 1, dtype=torch.int64)
    _sort(indices.data_ptr(), count, num_experts, places.data_ptr(), offsets.data_ptr())
    rows = torch.empty(count, size)
    arguments = (rows.data_ptr(), x.data_ptr(), x.stride(0), places.data_ptr(), top_k, size)
    run_rows(_spread_parallel, len(x), top_k * size, arguments)
    return rows, places, offsets


def combine_experts(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if rows.dtype is not torch.float32:
        return reference.combine_experts(rows, places, weights)
    weights = weights.float().contiguous()
    num_rows, top_k = weights.shape
    out = torch.empty(num_rows, rows.shape[1])
    arguments = (out.data_ptr(), rows.data_ptr(), places.data_ptr(), weights.data_ptr(), top_k, rows.shape[1])
    run_rows(_combine_parallel, num_rows, top_k * rows.shape[1], arguments)
    return out


@cache
def warm_up() -> None:
    """Compile the kernels, or load them from disk, before a step needs them."""
    x, top_k = torch.zeros(1, 64), Routing(top_k=1)
    weights, indices = route(x, None, top_k)
    rows, places, _ = sort_by_expert(x, indices, 64)
    combine_experts(rows, places, weights)
    fused_rows.silu_and_mul(x)
    clamped_swiglu(x, 1.0, 1.0)


@jit(exact=True)
def _score_row(logits, scores, num_experts, kind):
    largest = logits[0]
    for i in range(1, num_experts):
        largest = max(largest, logits[i])
    total = ZERO
    for i in range(num_experts):
        if kind == _SIGMOID:
            scores[i] = np.float32(1.0) / (np.float32(1.0) + np.exp(-logits[i]))
        else:
            scores[i] = np.exp(logits[i] - largest)
            total += scores[i]
    if kind == _SOFTMAX:
        for i in range(num_experts):
            scores[i] = scores[i] / total


@jit(exact=True)
def _best(values, begin, end):
    """Return the index of the largest value above -inf, the first of equal ones; any index if all are NaN."""
    best = begin
    for i in range(begin, end):
        if values[i] > values[best] or values[best] == _LOWEST:
            best = i
    return best


@jit(exact=True)
def _keep_groups(choice, groups, num_experts, num_groups, kept_groups, group_best):
    """Set the experts of all but the best groups to -inf."""
    size = num_experts // num_groups
    for group in range(num_groups):
        begin, end = group * size, (group + 1) * size
        first = _best(choice, begin, end)
        groups[group] = choice[first]
        if group_best > 1 and size > 1:
            second = begin if first != begin else begin + 1
            for i in range(begin, end):
                if i != first and choice[i] > choice[second]:
                    second = i
            groups[group] += choice[second]
    for _ in range(num_groups - kept_groups):
        worst = -1
        for group in range(num_groups):
            if groups[group] != np.float32(np.inf) and (worst < 0 or groups[group] <= groups[worst]):
                worst = group
        worst = max(worst, 0)  # scores that are not finite
        groups[worst] = np.float32(np.inf)
        for i in range(worst * size, (worst + 1) * size):
            choice[i] = _LOWEST


@jit(exact=True, allocates=True)
def _route_rows(first, last, weights, indices, rows, num_experts, choice_of, numbers):
    logits, stride, bias = rows
    num_groups, kept_groups, group_best, top_k = choice_of
    kind, normalizes, epsilon, scale = numbers
    scores, choice = np.empty(num_experts, np.float32), np.empty(num_experts, np.float32)
    groups = np.empty(num_groups, np.float32)
    for row in range(first, last):
        _score_row(f32_pointer(logits + F32 * row * stride), scores, num_experts, kind)
        for i in range(num_experts):
            choice[i] = scores[i] + f32_pointer(bias)[i] if bias != 0 else scores[i]
        if num_groups > 1:
            _keep_groups(choice, groups, num_experts, num_groups, kept_groups, group_best)
        total = ZERO
        for j in range(top_k):
            best = _best(choice, 0, num_experts)
            choice[best] = _LOWEST
            i64_pointer(indices)[row * top_k + j] = best
            f32_pointer(weights)[row * top_k + j] = scores[best]
            total += scores[best]
        for j in range(top_k):
            weight = f32_pointer(weights)[row * top_k + j]
            f32_pointer(weights)[row * top_k + j] = (
                weight / (total + epsilon) if normalizes else weight
            ) * scale


@jit
def _sort(indices, count, num_experts, places, offsets):
    """Counting sort; rows of an expert stay in order."""
    starts = i64_pointer(offsets)
    for expert in range(num_experts + 1):
        starts[expert] = 0
    for slot in range(count):
        starts[i64_pointer(indices)[slot] + 1] += 1
    for expert in range(num_experts):
        starts[expert + 1] += starts[expert]
    for slot in range(count):
        expert = i64_pointer(indices)[slot]
        i64_pointer(places)[slot] = starts[expert]
        starts[expert] += 1
    for expert in range(num_experts, 0, -1):
        starts[expert] = starts[expert - 1]
    starts[0] = 0


@jit
def _spread_rows(first, last, rows, x, x_stride, places, top_k, size):
    """Copy each row of x to the positions of its experts."""
    whole = F32 * size // VECTOR * VECTOR
    for row in range(first, last):
        source = x + F32 * row * x_stride
        for j in range(top_k):
            target = rows + F32 * size * i64_pointer(places)[row * top_k + j]
            for at in range(0, whole, VECTOR):
                vector.store(target + at, vector.load(source + at))
            for i in range(whole // F32, size):
                f32_pointer(target)[i] = f32_pointer(source)[i]


@jit
def _at_most(numbers, bound):
    """Return the elementwise minimum of two vectors: the negated maximum of their negatives."""
    minus = vector.splat(-ONE)
    return vector.multiply(
        vector.maximum(vector.multiply(numbers, minus), vector.multiply(bound, minus)), minus
    )


@jit
def _clamped_rows(first, last, gate_up, stride, out, size, alpha, limit):
    whole = F32 * size // VECTOR * VECTOR
    gain, highest = -alpha * LOG2_E, fused_rows.LOWEST_GATE * -LOG2_E
    one, most, least = vector.splat(ONE), vector.splat(limit), vector.splat(-limit)
    for row in range(first, last):
        gates, target = gate_up + F32 * row * stride, out + F32 * row * size
        ups = gates + F32 * size
        for at in range(0, whole, VECTOR):
            gate = _at_most(vector.load(gates + at), most)
            up = vector.maximum(_at_most(vector.load(ups + at), most), least)
            power = vector.exp2(_at_most(vector.multiply(gate, vector.splat(gain)), vector.splat(highest)))
            glu = vector.divide(gate, vector.add(one, power))
            vector.store(target + at, vector.multiply(glu, vector.add(up, one)))
        for i in range(whole // F32, size):
            gate_i = min(f32_pointer(gates)[i], limit)
            power_i = np.exp2(min(gate_i * gain, highest))
            up_i = max(min(f32_pointer(ups)[i], limit), -limit)
            f32_pointer(target)[i] = gate_i / (ONE + power_i) * (up_i + ONE)


@jit
def _combine_rows(first, last, out, rows, places, weights, top_k, size):
    """out = the weighted sum of each row's experts, in the order of selection."""
    whole = F32 * size // VECTOR * VECTOR
    for row in range(first, last):
        target = out + F32 * size * row
        for j in range(top_k):
            source = rows + F32 * size * i64_pointer(places)[row * top_k + j]
            weight = f32_pointer(weights)[row * top_k + j]
            factors = vector.splat(weight)
            for at in range(0, whole, VECTOR):
                term = vector.multiply(vector.load(source + at), factors)
                if j > 0:
                    term = vector.add(vector.load(target + at), term)
                vector.store(target + at, term)
            for i in range(whole // F32, size):
                term_i = weight * f32_pointer(source)[i]
                f32_pointer(target)[i] = term_i if j == 0 else f32_pointer(target)[i] + term_i


@jit
def _route_parallel(num_threads, num_rows, *arguments):
    launch_rows(_route_rows, num_threads, num_rows, arguments)


@jit
def _spread_parallel(num_threads, num_rows, *arguments):
    launch_rows(_spread_rows, num_threads, num_rows, arguments)


@jit
def _clamped_parallel(num_threads, num_rows, *arguments):
    launch_rows(_clamped_rows, num_threads, num_rows, arguments)


@jit
def _combine_parallel(num_threads, num_rows, *arguments):
    launch_rows(_combine_rows, num_threads, num_rows, arguments)
