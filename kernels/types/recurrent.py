"""A step's metadata for layers with a state in place of keys and values. Tensors only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemill.kernels.types.low_rank import AdapterRows


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of a step with equally many tokens: a recurrent layer computes them as one batch."""

    tokens: torch.Tensor | slice
    """[num_rows * length] int64, or a range: the places of their tokens in the step, row by row."""
    length: int
    slots: torch.Tensor
    """[num_rows] int64: where the state of each is."""
    is_new: bool
    """They have not been computed yet: their slots contain another sequence's state."""
    adapters: AdapterRows | None = None
    """Of their tokens; None: no token of the step has one."""
    row_adapters: AdapterRows | None = None
    """The same for one token of each row."""


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """What the recurrent layers need of a step."""

    states: list[list[torch.Tensor]]
    """By recurrent layer: its tensors [num_slots, ...]."""
    rows: list[StateRows]
    """Together all tokens of the step but its padding."""
