"""A step's metadata for layers with a state instead of keys and values. Tensors only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemill.kernels.types.low_rank import AdapterRows


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of a step with the same number of tokens, which a recurrent layer computes as one batch."""

    tokens: torch.Tensor | slice
    """[num_rows * length] int64, or a range: the positions of their tokens in the step, row by row."""
    length: int
    slots: torch.Tensor
    """[num_rows] int64: the slot of each row's state."""
    is_new: bool
    """True for rows that were not computed yet: their slots contain another sequence's state."""
    adapters: AdapterRows | None = None
    """The adapters of their tokens; None: no token of the step has an adapter."""
    row_adapters: AdapterRows | None = None
    """The same for one token per row."""


@dataclass(frozen=True, slots=True)
class RecurrentStep:
    """The state tensors and rows that recurrent layers use in a step."""

    states: list[list[torch.Tensor]]
    """Tensors [num_slots, ...] by recurrent layer."""
    rows: list[StateRows]
    """Together, all tokens of the step except padding."""
