"""Low-bit integers in 32-bit words, the first one in the lowest bits."""

from __future__ import annotations

import torch


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of int32 words [rows, columns], uint8 [rows, columns * 32 / bits]; `bits` divides 8."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    places = [(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(places, dim=-1).view(len(words), -1)
