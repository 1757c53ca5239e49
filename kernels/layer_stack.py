"""A model's decoder layers in a row, with what they share looked up once per step instead of once per layer.

Between two layers the kernels have just pushed Python's own code and objects out of the caches: what costs ten
microseconds in a loop of its own costs seventy there. So nothing but the kernels' calls is left between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cpu_jit import use_torch_threads
from kernels.cpu_layer import DecoderLayer
from kernels.cpu_layer_steps import finish, place_and_attend, project
from kernels.layer_cache import LayerCache
from kernels.metadata import AttentionMetadata


class LayerStack:
    """Calls `DecoderLayer.run` of every layer in order, the same to the last bit."""

    def __init__(self, layers: Sequence[DecoderLayer], rotates: Sequence[bool]) -> None:
        """`layers` share their buffers; `rotates[i]`: whether layer i takes the rotation."""
        assert len({id(layer._buffers) for layer in layers}) == 1
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
        cos, sin = rotation
        assert hidden.dtype is cos.dtype is sin.dtype is torch.float32
        assert hidden.is_contiguous()
        assert cos.stride() == sin.stride()
        assert cos.stride(1) == 1
        buffers = self._first._buffers
        buffers.begin(metadata, len(hidden), self._first._weights)
        buffers.read(len(hidden), None)
        step, address, num_threads = buffers.record, hidden.data_ptr(), use_torch_threads()
        angles = (cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[1] // 2)
        num_left = len(self._layers)
        for (layer, rotates), cache in zip(self._layers, caches, strict=True):
            if cache is not layer._cache:
                layer._point_at(cache)
            num_left -= 1
            if not num_left and read_tokens is not None:
                buffers.read(len(hidden), read_tokens)
            project(layer._kind, layer._record, step, address, num_threads)
            place_and_attend(
                layer._element, layer._record, step, *(angles if rotates else (0, 0, 0, 0)), num_threads
            )
            finish(layer._kind, layer._record, step, address, num_threads)
