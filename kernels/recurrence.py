"""Recurrences in plain torch, computed token by token on states in their slots: the reference for the kernels.

Sources: Gated Delta Networks (arXiv 2412.06464); Mamba (arXiv 2312.00752), whose channels are heads of one
line; and Mamba-2 (arXiv 2405.21060).
"""

from __future__ import annotations

import torch

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


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
    """Return [num_rows, length, heads, value_dim] fp32, and advance the states of the rows in place.

    Each head first decays its state. It then replaces the state's output for the key with the value, in
    proportion to beta, and returns the new output for the query. Queries and keys are normalized to unit
    length.

    Args:
        states: [num_slots, heads, key_dim, value_dim] fp32.
        query, key: [num_rows, length, key_heads, key_dim] fp32; consecutive heads share a key head.
        value: [num_rows, length, heads, value_dim] fp32.
        decay: [num_rows, length, heads] fp32, the logarithm of the remaining fraction of the state.
        beta: [num_rows, length, heads] fp32, in (0, 1).
        slots: [num_rows] int64, all different.
        is_new: the rows do not have a state yet; the contents of their slots are ignored.
    """
    group = value.shape[2] // key.shape[2]
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (query, key))
    query, key = (
        x.repeat_interleave(group, dim=2)[..., None] for x in (query * query.shape[-1] ** -0.5, key)
    )
    state = torch.zeros_like(states[slots]) if is_new else states[slots]
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    for token in range(value.shape[1]):
        state = state * decay[:, token, :, None, None].exp()
        found = (state * key[:, token]).sum(-2)
        change = (value[:, token] - found) * beta[:, token, :, None]
        state = state + key[:, token] * change[:, :, None]
        out[:, token] = (state * query[:, token]).sum(-2)
    states[slots] = state
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
    """Return [num_rows, length, heads, head_dim] fp32, and advance the states of the rows in place.

    Args:
        states: [num_slots, heads, head_dim, state_size] fp32.
        x: [num_rows, length, heads, head_dim] fp32.
        steps: [num_rows, length, heads] fp32, the sizes of the time steps (dt).
        decay: [heads, 1], or [heads, state_size] with one value per element, fp32, below 0. The remaining fraction of a
            state after a step is exp(step * decay) (A).
        write, read: [num_rows, length, groups, state_size] fp32; consecutive heads share a group (B and C).
        slots: [num_rows] int64, all different.
        is_new: the rows do not have a state yet; the contents of their slots are ignored.
    """
    group = x.shape[2] // write.shape[2]
    write, read = (each.repeat_interleave(group, dim=2)[..., None, :] for each in (write, read))
    remains = (steps[..., None] * decay).exp()[..., None, :]
    x = (x * steps[..., None])[..., None]
    state = torch.zeros_like(states[slots]) if is_new else states[slots]
    out = x.new_empty(x.shape[:-1])
    for token in range(x.shape[1]):
        state = state * remains[:, token] + x[:, token] * write[:, token]
        out[:, token] = (state * read[:, token]).sum(-1)
    states[slots] = state
    return out
