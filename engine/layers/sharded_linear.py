"""Linear layers of which a rank holds a part, including the collectives inside them.

Layers split only by outputs do not need a class: they are smaller `nn.Linear`s. These are separate classes, so
that a check for exactly `nn.Linear` rejects them: merging one with its neighbors would lose the collective.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.quantized_weight import QuantizedWeight
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.layers.share import Share


class PartialLinear(nn.Linear):
    """A rank's part, as loaded. `Linear` adopts the weight, and calls `complete` after the matmul."""

    stored: QuantizedWeight | None = None
    """Replaces the weight if the checkpoint is quantized."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.complete(nn.functional.linear(x, self.weight))

    def complete(self, out: torch.Tensor) -> torch.Tensor:
        """Return the layer's output from this rank's x W^T."""
        raise NotImplementedError


class RowParallelLinear(PartialLinear):
    """y = sum over the ranks of x_r W_r^T, + b: a rank has some inputs. Takes [..., in_features of the rank]."""

    def __init__(self, in_features: int, out_features: int, group: RankGroup, **options: Any) -> None:
        """`in_features`: the rank's number; `options`: arguments of `nn.Linear`."""
        super().__init__(in_features, out_features, **options)
        self._group = group

    def complete(self, out: torch.Tensor) -> torch.Tensor:
        out = self._group.all_reduce(out.contiguous())
        return out if self.bias is None else out + self.bias


class GatheredHead(PartialLinear):
    """The head over the vocabulary: a rank has some of the tokens, and rank 0 gets the logits of all.

    The other ranks get zeros that do not use memory, as their logits are not read.
    """

    _rows_bias: torch.Tensor | None

    def __init__(self, whole: nn.Linear, share: Share, group: RankGroup) -> None:
        rows = share.of(whole.out_features)
        super().__init__(
            whole.in_features,
            rows.stop - rows.start,
            bias=False,
            device=torch.device("meta"),
            dtype=whole.weight.dtype,
        )
        # Views: weights tied to the embeddings are not copied.
        self.weight = nn.Parameter(whole.weight.detach()[rows], requires_grad=False)
        # A buffer, so that it moves to the device with the rest.
        self.register_buffer(
            "_rows_bias", None if whole.bias is None else whole.bias.detach()[rows], persistent=False
        )
        self._vocab_size = whole.out_features
        self._widths = [
            part.stop - part.start
            for part in (Share(rank, share.size).of(whole.out_features) for rank in range(share.size))
        ]
        self._group = group

    def complete(self, out: torch.Tensor) -> torch.Tensor:
        if self._rows_bias is not None:
            out = out + self._rows_bias
        missing = max(self._widths) - out.shape[-1]  # a collective needs tensors of one shape
        parts = self._group.gather(nn.functional.pad(out, (0, missing)).contiguous())
        if not parts:
            return out.new_zeros(1).expand(*out.shape[:-1], self._vocab_size)
        widths = zip(parts, self._widths, strict=True)
        return torch.cat([part[..., :width] for part, width in widths], dim=-1)
