"""The product of rows with packed weights of either kind to which rows are converted, as one call on tensors."""

from __future__ import annotations

import torch

from pagemill.kernels.cpu.jit.compiler import use_torch_threads
from pagemill.kernels.cpu.matmul.converted import NO_FORMAT, multiply_parallel


def multiply_packed(
    kind: object, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, out_features: int
) -> torch.Tensor:
    """x [num_rows, in_features] fp32 times packed weights, plus bias [num_panels * PANEL]; fresh and contiguous.

    Args:
        kind: INTEGERS or BFLOATS, whose `pack` made the weights.
    """
    num_rows, in_features = x.shape
    assert x.dtype is torch.float32
    assert x.stride(1) == 1 or in_features == 1
    out = torch.empty((num_rows, out_features))
    if num_rows:
        multiply_parallel(
            kind,
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            packed.data_ptr(),
            NO_FORMAT,
            bias.data_ptr(),
            num_rows,
            out_features,
            in_features,
            use_torch_threads(),
        )
    return out
