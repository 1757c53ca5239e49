"""ALiBi: a bias on every score that grows linearly with the distance, one slope per head.

Press, Smith, Lewis: Train Short, Test Long (arXiv 2108.12409). For head counts that are not powers of two
there are two ways to choose the slopes; each family uses the one that it was trained with.
"""

from __future__ import annotations

import math
from typing import Any

import torch


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Return the authors' slopes, used by BLOOM, Falcon and Baichuan: [num_heads] fp32.

    A geometric series for the largest power of two; the remaining heads take every other member of the series
    for twice as many.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = _geometric_series(power)
    slopes += _geometric_series(2 * power)[0::2][: num_heads - power]
    return torch.tensor(slopes, dtype=torch.float32)


def mpt_alibi_slopes(num_heads: int, bias_max: float) -> torch.Tensor:
    """Return MPT's slopes, [num_heads] fp32: the next power of two's series, odd members first, cut."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** -(bias_max * number / power) for number in range(1, power + 1)]
    if power != num_heads:
        slopes = (slopes[1::2] + slopes[0::2])[:num_heads]
    return torch.tensor(slopes, dtype=torch.float32)


def _geometric_series(length: int) -> list[float]:
    """Return 2 ** (-8 / length), its square, its cube and so on."""
    return [2.0 ** (-8.0 * number / length) for number in range(1, length + 1)]


def replace_rotation_by_alibi(module: Any) -> None:
    """Turn a LLaMA into its ALiBi variant: disable the rotation; the attention function adds the biases."""
    module.model.rotary_emb.inv_freq.zero_()  # cos 1, sin 0 at every position: exact in every dtype
    slopes = alibi_slopes(module.config.num_attention_heads)
    for layer in module.model.layers:
        layer.self_attn.register_buffer("alibi_slopes", slopes, persistent=False)
