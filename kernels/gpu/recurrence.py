"""The recurrences of `pagemill.kernels.recurrence`: a program keeps columns or lines of a head's state in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tuning import LAUNCHES
from pagemill.kernels.recurrence import NORM_EPS

_STATE = 4096
"""Values of a state that a program holds: 32 registers per thread."""
_DELTA, _SCAN = LAUNCHES["gated_delta_rule"], LAUNCHES["state_space_scan"]


def part_of(size: int, block: int) -> int:
    """Return the number of lines of `size` values per program, up to `block`."""
    padded = triton.next_power_of_2(size)
    room = _STATE if padded <= 128 else _STATE // 2  # vectors as long as a line also need registers
    return max(1, min(block, room // padded))


@triton.jit
def gated_delta_kernel(
    states_ptr,  # [num_slots, heads, key_dim, value_dim]
    query_ptr,  # [num_rows, length, key_heads, key_dim]
    key_ptr,
    value_ptr,  # [num_rows, length, heads, value_dim]
    decay_ptr,  # [num_rows, length, heads]
    beta_ptr,
    slots_ptr,  # [num_rows]
    out_ptr,  # [num_rows, length, heads, value_dim]
    length,
    heads,
    key_heads,
    key_dim,
    value_dim,
    scale,
    eps,
    IS_NEW: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, columns = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_column = keys < key_dim, columns < value_dim
    is_place = is_key[:, None] & is_column[None, :]
    slot = tl.load(slots_ptr + row)
    state_ptrs = states_ptr + (slot * heads + head) * key_dim * value_dim
    state_ptrs += keys[:, None] * value_dim + columns[None, :]
    if IS_NEW:
        state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    else:
        state = tl.load(state_ptrs, mask=is_place, other=0.0)
    key_head = head // (heads // key_heads)
    for token in range(length):
        place = (row * length + token) * heads + head
        shared = ((row * length + token) * key_heads + key_head) * key_dim
        k = tl.load(key_ptr + shared + keys, mask=is_key, other=0.0)
        q = tl.load(query_ptr + shared + keys, mask=is_key, other=0.0)
        v = tl.load(value_ptr + place * value_dim + columns, mask=is_column, other=0.0)
        k = k / tl.sqrt(tl.sum(k * k) + eps)
        q = q * (scale / tl.sqrt(tl.sum(q * q) + eps))
        state = state * tl.exp(tl.load(decay_ptr + place))
        found = tl.sum(state * k[:, None], axis=0)
        change = (v - found) * tl.load(beta_ptr + place)
        state = state + k[:, None] * change[None, :]
        out = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + place * value_dim + columns, out, mask=is_column)
    tl.store(state_ptrs, state, mask=is_place)


@triton.jit
def state_space_kernel(
    states_ptr,  # [num_slots, heads, head_dim, state_size]
    x_ptr,  # [num_rows, length, heads, head_dim]
    steps_ptr,  # [num_rows, length, heads]
    decay_ptr,  # [heads, DECAY_SIZE]
    write_ptr,  # [num_rows, length, groups, state_size]
    read_ptr,
    slots_ptr,  # [num_rows]
    out_ptr,  # [num_rows, length, heads, head_dim]
    length,
    heads,
    groups,
    head_dim,
    state_size,
    DECAY_SIZE: tl.constexpr,  # 1, or state_size
    IS_NEW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lines, places = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    is_line, is_place = lines < head_dim, places < state_size
    is_both = is_line[:, None] & is_place[None, :]
    slot = tl.load(slots_ptr + row)
    state_ptrs = states_ptr + (slot * heads + head) * head_dim * state_size
    state_ptrs += lines[:, None] * state_size + places[None, :]
    if IS_NEW:
        state = tl.zeros([BLOCK_D, BLOCK_S], tl.float32)
    else:
        state = tl.load(state_ptrs, mask=is_both, other=0.0)
    if DECAY_SIZE == 1:
        decay = tl.load(decay_ptr + head + tl.zeros([BLOCK_S], tl.int32))
    else:
        decay = tl.load(decay_ptr + head * DECAY_SIZE + places, mask=is_place, other=0.0)
    group = head // (heads // groups)
    for token in range(length):
        place = (row * length + token) * heads + head
        shared = ((row * length + token) * groups + group) * state_size
        step = tl.load(steps_ptr + place)
        x = tl.load(x_ptr + place * head_dim + lines, mask=is_line, other=0.0) * step
        write = tl.load(write_ptr + shared + places, mask=is_place, other=0.0)
        read = tl.load(read_ptr + shared + places, mask=is_place, other=0.0)
        state = state * tl.exp(step * decay)[None, :] + x[:, None] * write[None, :]
        out = tl.sum(state * read[None, :], axis=1)
        tl.store(out_ptr + place * head_dim + lines, out, mask=is_line)
    tl.store(state_ptrs, state, mask=is_both)


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
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    given = [each.contiguous() for each in (query, key, value, decay, beta)]
    block = part_of(key_dim, _DELTA.block)
    gated_delta_kernel[(num_rows, heads, triton.cdiv(value_dim, block))](
        states, *given, slots, out, length, heads, key_heads, key_dim, value_dim, key_dim**-0.5, NORM_EPS,
        IS_NEW=is_new, BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=block, num_warps=_DELTA.num_warps,
    )  # fmt: skip
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
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    given = [each.contiguous() for each in (x, steps, decay, write, read)]
    block = part_of(state_size, min(_SCAN.block, triton.next_power_of_2(head_dim)))
    state_space_kernel[(num_rows, heads, triton.cdiv(head_dim, block))](
        states, *given, slots, out, length, heads, groups, head_dim, state_size,
        DECAY_SIZE=decay.shape[1], IS_NEW=is_new,
        BLOCK_D=block, BLOCK_S=triton.next_power_of_2(state_size), num_warps=_SCAN.num_warps,
    )  # fmt: skip
    return out
