"""A model's decoder layers in a row, with what they share looked up once per step instead of once per layer.

Between two layers the kernels have just pushed Python's own code and objects out of the caches: what costs ten
microseconds in a loop of its own costs seventy there. So nothing but the kernels' calls is left between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagemill.kernels.cpu.jit.compiler import use_torch_threads
from pagemill.kernels.cpu.layer.layer import NO_ROTATION, DecoderLayer, angles_of
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata


class LayerStack:
    """Calls `DecoderLayer.run` of every layer in order, the same to the last bit."""

    def __init__(self, layers: Sequence[DecoderLayer], rotates: Sequence[bool]) -> None:
        """`layers` share their buffers; `rotates[i]`: whether layer i takes the rotation."""
        assert len({id(layer.buffers) for layer in layers}) == 1
        self._layers = list(zip(layers, rotates, strict=True))
        self._first = layers[0]

    def run(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        read_tokens: torch.Tensor | None = None,
    ) -> None:
        """Replace `hidden` [num_tokens, hidden_size], fp32 and contiguous, by the last layer's output.

        Args:
            rotation: cos and sin, rows of num_tokens; the width of cos is the rotary dimension, and of both only
                the first half is read.
            caches: one per layer.
            read_tokens: as `DecoderLayer.run` has it, for the last layer.
        """
        assert hidden.dtype is torch.float32
        assert hidden.is_contiguous()
        assert rotation[0].stride(1) == 1
        buffers = self._first.buffers
        buffers.begin(metadata.of_group(0), len(hidden), self._first.weights)
        buffers.read(len(hidden), None)
        angles, address, num_threads = angles_of(rotation), hidden.data_ptr(), use_torch_threads()
        num_left, group = len(self._layers), 0
        for (layer, rotates), cache in zip(self._layers, caches, strict=True):
            num_left -= 1
            if not num_left and read_tokens is not None:
                buffers.read(len(hidden), read_tokens)
            if cache.group != group:
                group = cache.group
                buffers.begin(metadata.of_group(group), len(hidden), self._first.weights)
            layer.compute(address, angles if rotates else NO_ROTATION, cache, num_threads)
