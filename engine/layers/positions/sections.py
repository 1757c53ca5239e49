"""Rotation by three positions per token (M-RoPE): each frequency takes its angle from one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RotarySections:
    """The position used by each frequency: 0 time, 1 height, 2 width."""

    axes: torch.Tensor  # [rotary_dim / 2] int64, on the model's device

    @classmethod
    def from_decoder(
        cls, decoder: Any, device: torch.device, *, is_interleaved: bool
    ) -> RotarySections | None:
        """Return the sections of transformers' language model; None if its tokens have one position."""
        rotary = getattr(decoder, "rotary_emb", None)
        rope = getattr(decoder.config, "rope_parameters", None) or {}
        sizes = getattr(rotary, "mrope_section", None) or rope.get("mrope_section")
        if rotary is None or not sizes:
            return None
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
        if is_interleaved:  # time, height, width, time, ...; the remaining time frequencies are last
            axes = torch.zeros(len(rotary.inv_freq), dtype=torch.int64)
            for axis in (1, 2):
                axes[axis : 3 * sizes[axis] : 3] = axis
        return cls(axes.to(device))

    def combine(self, of_axes: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Select each frequency from its axis.

        Args:
            of_axes: cosines or sines of the positions of each axis, [..., any multiple of rotary_dim / 2].
        """
        time, height, width = of_axes
        axes = self.axes.repeat(time.shape[-1] // len(self.axes))
        return torch.where(axes == 1, height, torch.where(axes == 2, width, time))
