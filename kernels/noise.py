"""Counter-based sampling noise: a pure function of (seed, sample index, output position, token id).

All steps except the last use integer arithmetic. Every implementation therefore draws the same bits,
regardless of the batch, the device or the number of attempts. Gumbel noise added to logits makes argmax a
draw from their softmax (Gumbel-max trick; Maddison, Tarlow and Minka 2014, arXiv:1411.0030).
"""

from __future__ import annotations

import torch

# Finalizer constants of MurmurHash3 (public domain), as signed 32-bit integers: torch's int32 wraps.
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)
_GOLDEN = 0x9E3779B9 - (1 << 32)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer, in place on an int32 tensor."""
    x ^= (x >> 16) & 0xFFFF  # torch's >> keeps the sign: the mask makes it a logical shift
    x *= _MIX_1
    x ^= (x >> 13) & 0x7FFFF
    x *= _MIX_2
    x ^= (x >> 16) & 0xFFFF
    return x


def noise_keys(seeds: torch.Tensor, sample_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return one 32-bit key per row.

    Args:
        seeds: [num_rows] int64, in [0, 2**63).
        sample_indices: [num_rows], the index among the request's n samples.
        positions: [num_rows] output position, counted from the first generated token.

    Returns:
        [num_rows] int32.
    """
    key = _mix((seeds & 0xFFFFFFFF).to(torch.int64).add_(_GOLDEN).to(torch.int32))
    for word in (seeds >> 32, sample_indices, positions):
        # Chained, so that a permutation of (seed, index, position) has a different key.
        key = _mix((key ^ word.to(torch.int32)) * 5 + _GOLDEN)
    return key


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise.

    Args:
        keys: [num_rows] int32, from `noise_keys`.
        token_ids: [num_tokens] or [num_rows, num_tokens] int32, the tokens to draw for.

    Returns:
        [num_rows, num_tokens] float32, always finite.
    """
    bits = _mix(_mix(token_ids.to(torch.int32) * _GOLDEN ^ keys[:, None]).add_(keys[:, None]))
    # 31 bits: torch has no unsigned conversion. Small u produce large noise, and keep full precision.
    uniform = (bits & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    uniform.clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def argmax_of_sums(
    logits: torch.Tensor, keys: torch.Tensor, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Definition of `selection.argmax_with_noise`: noise for every token.

    With `token_ids` [num_columns], ascending, the columns are those tokens instead of the complete
    vocabulary, and the results are column indices.
    """
    if token_ids is None:
        token_ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return (logits + gumbel_noise(keys, token_ids)).argmax(dim=-1)
