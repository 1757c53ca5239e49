"""Inputs of the recurrences."""

from __future__ import annotations

from typing import Any

import torch

SHAPES = [(3, 5, 4, 2, 16, 8), (2, 7, 4, 4, 20, 70), (1, 1, 2, 1, 128, 128), (4, 9, 2, 2, 64, 64)]
"""Rows, tokens, heads, heads of keys or groups, and the sizes of a state."""
NUM_SLOTS = 6
NAMES = ("gated_delta_rule", "state_space_scan", "selective_scan")
"""Names of the rules. The last is the second with a decay for each position."""


def recurrence_case(
    name: str, shape: tuple[int, ...]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return states, arguments of one row per slot, and slots."""
    rows, length, heads, groups, first, second = shape
    random = torch.Generator().manual_seed(sum(shape))

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=random)

    def uniform(*sizes: int) -> torch.Tensor:
        return torch.rand(*sizes, generator=random)

    if name == "gated_delta_rule":
        keys = [normal(rows, length, groups, first) for _ in range(2)]
        gates = [-uniform(rows, length, heads), uniform(rows, length, heads)]
        given = [*keys, normal(rows, length, heads, second), *gates]
    else:
        has_one = name == "state_space_scan"
        steps, decay = uniform(rows, length, heads), -uniform(heads, 1 if has_one else second)
        lines = [normal(rows, length, groups, second) for _ in range(2)]
        given = [normal(rows, length, heads, first), steps, decay, *lines]
    slots = torch.randperm(NUM_SLOTS, generator=random)[:rows]
    return normal(NUM_SLOTS, heads, first, second), given, slots


def operator_of(module: Any, name: str) -> Any:
    return getattr(module, "gated_delta_rule" if name == "gated_delta_rule" else "state_space_scan")
