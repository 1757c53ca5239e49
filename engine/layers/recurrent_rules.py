"""Replaces transformers' functions for recurrences by Pagemill's kernels, which advance states in place.

The modules call these functions by name. A replacement calls the original, unless a packed batch runs: then
it accesses the states in their slots. This avoids gathering states, a dozen operations on them, and writing them back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch

from pagemill.kernels.dispatch import gated_delta_rule, state_space_scan
from pagemill.kernels.types.recurrent import StateRows


@dataclass(frozen=True, slots=True)
class _Slots:
    """The location of the states of the rows that a module computes."""

    states: torch.Tensor
    rows: StateRows


_running: ContextVar[_Slots | None] = ContextVar("running_recurrence", default=None)


@contextmanager
def states_in_slots(states: torch.Tensor, rows: StateRows) -> Iterator[None]:
    """Make the replaced functions advance `states` [num_slots, ...] of these rows, inside the block."""
    token = _running.set(_Slots(states, rows))
    try:
        yield
    finally:
        _running.reset(token)


def _delta(
    at: _Slots, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    g: torch.Tensor, beta: torch.Tensor, *, use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output [num_rows, length, heads, value_dim], without states: they are written in place."""
    if not use_qk_l2norm_in_kernel:
        raise NotImplementedError("the gated delta rule without normalized queries and keys")
    given = (each.float() for each in (query, key, value, g, beta))
    out = gated_delta_rule(at.states, *given, at.rows.slots, is_new=at.rows.is_new)
    return out.to(query.dtype), at.states[:0]


def _scan(
    at: _Slots, hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, *, z: torch.Tensor | None = None,
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute the same recurrence; return [num_rows, length, heads, head_dim]."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = torch.nn.functional.softplus(dt) if dt_softplus else dt
    x, steps = hidden_states.float(), steps.clamp(*dt_limit).float()
    out = state_space_scan(
        at.states, x, steps, A.float()[:, None], B.float(), C.float(), at.rows.slots, is_new=at.rows.is_new
    )
    out = out if D is None else out + D[:, None] * x
    return (out if z is None else out * torch.nn.functional.silu(z.float())), at.states[:0]


def _scan_one(
    at: _Slots, _state: Any, hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor,
    B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, *,
    z: torch.Tensor | None = None, **more: Any,
) -> torch.Tensor:  # fmt: skip
    """Compute one token of each row, whose values per head are repeated for each position of its state."""
    out, _ = _scan(
        at, hidden_states[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None],
        None if D is None else D[:, 0], None if dt_bias is None else dt_bias[:, 0],
        z=None if z is None else z[:, None], **more,
    )  # fmt: skip
    return out[:, 0].to(hidden_states.dtype)


def _selective_scan(
    at: _Slots, hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor | None = None, z: torch.Tensor | None = None, delta_bias: torch.Tensor | None = None, *,
    delta_softplus: bool = False, return_last_state: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """Compute channels as heads of width one; accept and return [num_rows, channels, length]."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
    steps = torch.nn.functional.softplus(dt) if delta_softplus else dt
    x, steps, write, read = (each.float().transpose(1, 2) for each in (hidden_states, steps, B, C))
    lines = at.states[:, :, None]
    out = state_space_scan(
        lines, x[..., None], steps, A.float(), write[:, :, None], read[:, :, None], at.rows.slots,
        is_new=at.rows.is_new,
    )[..., 0].transpose(1, 2)  # fmt: skip
    out = out if D is None else out + D[:, None] * hidden_states
    out = out if z is None else out * torch.nn.functional.silu(z)
    return (out, at.states[:0]) if return_last_state else out


def _selective_scan_one(
    at: _Slots, _state: Any, hidden_states: torch.Tensor, dt: torch.Tensor, A: torch.Tensor,
    B: torch.Tensor, C: torch.Tensor, D: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, *,
    dt_softplus: bool = False, z: torch.Tensor | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Compute one token of each row."""
    out: torch.Tensor = _selective_scan(
        at, hidden_states[..., None], dt[..., None], A, B[..., None], C[..., None], D,
        None if z is None else z[..., None], dt_bias, delta_softplus=dt_softplus,
    )  # fmt: skip
    return out[..., 0].to(hidden_states.dtype)


_RULES: dict[str, tuple[Callable[..., Any], int]] = {
    "torch_chunk_gated_delta_rule": (_delta, 3),
    "torch_recurrent_gated_delta_rule": (_delta, 3),
    "mamba2_chunk_scan": (_scan, 3),
    "mamba2_selective_state_update": (_scan_one, 3),
    "mamba_selective_scan": (_selective_scan, 2),
    "mamba_selective_state_update": (_selective_scan_one, 2),
}
"""Name of transformers' function -> the rule, and the number of dimensions of its state."""


class _Replacement:
    def __init__(self, own: Callable[..., Any], rule: Callable[..., Any]) -> None:
        update_wrapper(self, own)
        self._own, self._rule = own, rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        at = _running.get()
        return self._own(*args, **kwargs) if at is None else self._rule(at, *args, **kwargs)


def computes_in_slots(module: Any) -> bool:
    """Replace a recurrent module's functions, if possible; return True if they are replaced.

    Replacement requires one recurrent state in fp32, and that all recurrences are known.
    """
    recurrent = [tensor for tensor in module.state_tensors if tensor.kind == "recurrent_states"]
    if [tensor.dtype for tensor in recurrent] != [torch.float32]:
        return False
    forward = inspect.unwrap(type(module).forward)
    used = set(forward.__code__.co_names) & _RULES.keys() & forward.__globals__.keys()
    if any(_RULES[name][1] != len(recurrent[0].shape) for name in used):
        return False
    for name in used:
        own = forward.__globals__[name]
        if not isinstance(own, _Replacement):
            forward.__globals__[name] = _Replacement(own, _RULES[name][0])
    return bool(used)
