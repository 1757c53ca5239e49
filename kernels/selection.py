"""The best tokens of a row of logits, with and without noise, and the cuts of top-k and top-p.

The cuts are the k-th largest logit, and the least likely token of the smallest set with a given mass. The
plain torch versions sort, or search some of the best tokens. The modules of `pagemill.kernels.cpu.sampling`
return the same values without sorting.
"""

from __future__ import annotations

import importlib.util

import torch

from pagemill.kernels.noise import argmax_of_sums

_HEADS = (256, 4096)
"""Numbers of best tokens that top-p inspects before it sorts the complete vocabulary."""


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest value of each row [num_rows, vocab_size] and its index, like `Tensor.max(dim=-1)`.

    The first of equal values is used, also for 0.0 and -0.0; in a row with NaN, the first NaN.
    """
    if has_compiled_face(logits):
        from pagemill.kernels.cpu.sampling import argmax as cpu_argmax

        return cpu_argmax.largest(logits)
    peaks, places = logits.max(dim=-1)
    return peaks, places


def kth_largest(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the counts[r]-th largest value of row r, with equal values counted separately.

    Args:
        logits: [num_rows, vocab_size].
        counts: [num_rows] int64, in [1, vocab_size].

    Returns:
        [num_rows, 1]; undefined for a row with NaN.
    """
    if has_compiled_face(logits):
        from pagemill.kernels.cpu.sampling import selection as cpu_selection

        return cpu_selection.kth_largest(logits, counts)
    return kth_of_best(logits, counts)


def kth_of_best(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Definition of `kth_largest`."""
    return logits.topk(int(counts.max())).values.gather(1, counts[:, None] - 1)


def top_p_thresholds(logits: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Return the least likely logit of each row's smallest set with at least this mass.

    Probabilities are summed in fp64 in descending order, so every implementation has the same result.

    Args:
        logits: [num_rows, vocab_size].
        mass: [num_rows] fp64.

    Returns:
        [num_rows, 1]; undefined for a row with NaN.
    """
    probabilities = logits.softmax(dim=-1)
    if has_compiled_face(logits):
        from pagemill.kernels.cpu.sampling import selection as cpu_selection

        return cpu_selection.top_p_thresholds(logits, probabilities, mass)
    return top_p_of_best(logits, probabilities, mass)


def top_p_of_best(logits: torch.Tensor, probabilities: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Definition of `top_p_thresholds`."""
    size = logits.shape[-1]
    mass = mass[:, None]
    thresholds = torch.empty_like(logits[:, :1])
    rows = torch.arange(len(logits), device=logits.device)
    # On other devices a sort is cheap, and reading which rows are complete would wait for the device.
    for num_best in [n for n in _HEADS if n < size and logits.device.type == "cpu"] + [size]:
        ordered, ids = (
            logits[rows].sort(dim=-1, descending=True) if num_best == size else logits[rows].topk(num_best)
        )
        reached = probabilities[rows].gather(1, ids).cumsum(dim=-1, dtype=torch.float64)
        # The first token whose predecessors reach the mass is excluded: tokens before it remain, plus one
        # more.
        num_kept = (reached < mass[rows]).sum(dim=-1, keepdim=True).clamp_(max=num_best - 1)
        thresholds[rows] = ordered.gather(1, num_kept)
        if num_best < size:
            rows = rows[reached[:, -1] < mass[rows, 0]]
            if not len(rows):
                break
    return thresholds


def argmax_with_noise(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the token with the highest sum of logit and noise in each row, the lowest id of several; [num_rows] int64.

    Args:
        logits: [num_rows, vocab_size], the largest of each row 0. A row with NaN returns any token.
        keys: [num_rows] int32, from `noise_keys`.
    """
    if has_compiled_face(logits):
        from pagemill.kernels.cpu.sampling import noise as cpu_noise

        return cpu_noise.argmax_with_noise(logits, keys)
    return argmax_of_sums(logits, keys)


def has_compiled_face(logits: torch.Tensor) -> bool:
    """Return True if a compiled operator supports these logits."""
    is_fast = logits.device.type == "cpu" and logits.dtype is torch.float32 and logits.stride(1) == 1
    return is_fast and importlib.util.find_spec("numba") is not None
