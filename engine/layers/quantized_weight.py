"""A linear layer's weight as a quantized checkpoint stores it, read when its matmul is created."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagemill.kernels.types.grouped_weight import GroupedWeight, merged


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Represents a tensor [out_features, in_features].

    It can be cut along the outputs, and along the inputs at multiples of a group. The represented weight is
    read again each time, because layers are converted one by one and only the mapped file is referenced.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    """The model's dtype."""
    read: Callable[[], GroupedWeight | torch.Tensor]
    """Returns a tensor of the shape if the values do not have groups with a scale."""

    def __len__(self) -> int:
        return self.shape[0]

    def dense(self) -> torch.Tensor:
        """Return the weight as a tensor of the model's dtype."""
        weight = self.read()
        return (weight if isinstance(weight, torch.Tensor) else weight.dequantize()).to(self.dtype)

    def grouped(self) -> GroupedWeight | None:
        """Return the weight in its stored form; None if its values do not have groups with a scale."""
        weight = self.read()
        return None if isinstance(weight, torch.Tensor) else weight

    def outputs(self, part: slice) -> QuantizedWeight:
        part = slice(*part.indices(self.shape[0]))

        def read() -> GroupedWeight | torch.Tensor:
            weight = self.read()
            return weight[part] if isinstance(weight, torch.Tensor) else weight.outputs(part)

        return QuantizedWeight((part.stop - part.start, self.shape[1]), self.dtype, read)

    def inputs(self, part: slice) -> QuantizedWeight | torch.Tensor:
        """Return the weight of some inputs, as a tensor if these are not complete groups."""
        part = slice(*part.indices(self.shape[1]))
        whole = self.grouped()
        if whole is None or whole.inputs(part) is None:
            return self.dense()[:, part].contiguous()

        def read() -> GroupedWeight:
            whole = self.grouped()
            cut = None if whole is None else whole.inputs(part)
            assert cut is not None
            return cut

        return QuantizedWeight((self.shape[0], part.stop - part.start), self.dtype, read)


Weight = torch.Tensor | QuantizedWeight


def outputs_of(weight: Weight, part: slice) -> Weight:
    """Return some outputs of a weight, or of a bias."""
    return weight.outputs(part) if isinstance(weight, QuantizedWeight) else weight[part]


def inputs_of(weight: Weight, part: slice) -> Weight:
    """Return some inputs of a weight. Only these are read from a mapped file."""
    return weight.inputs(part) if isinstance(weight, QuantizedWeight) else weight[:, part].contiguous()


def dense(weights: Sequence[Weight]) -> torch.Tensor:
    """Return one tensor with the weights' outputs concatenated."""
    tensors = [weight.dense() if isinstance(weight, QuantizedWeight) else weight for weight in weights]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def joined(weights: Sequence[Weight]) -> Weight:
    """Return one weight with the weights' outputs concatenated, in stored form if all have the same format."""
    if len(weights) == 1:
        return weights[0]
    if grouped(weights) is None:
        return dense(weights)

    def read() -> GroupedWeight:
        whole = grouped(weights)
        assert whole is not None
        return whole

    return QuantizedWeight((sum(map(len, weights)), weights[0].shape[1]), weights[0].dtype, read)


def grouped(weights: Sequence[Weight]) -> GroupedWeight | None:
    """Read weights as one low-bit weight; None if any is not low-bit, or their formats differ."""
    parts = []
    for weight in weights:
        part = weight.grouped() if isinstance(weight, QuantizedWeight) else None
        if part is None:
            return None
        parts.append(part)
    return merged(parts)
