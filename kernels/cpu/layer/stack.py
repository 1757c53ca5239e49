"""A model's decoder layers as one compiled call.

After a layer, the kernels have evicted Python's code and objects from the caches: work that takes 10 us in a
tight loop takes 70 us between layers. So no Python runs between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch

from pagemill.kernels.cpu.attention.decode import decode
from pagemill.kernels.cpu.attention.prefill import prefill
from pagemill.kernels.cpu.jit.compiler import jit, use_torch_threads
from pagemill.kernels.cpu.jit.element import element_of
from pagemill.kernels.cpu.layer.layer import LAYER, DecoderLayer, describe, point_at
from pagemill.kernels.cpu.layer.step_buffers import STEP, StepBuffers
from pagemill.kernels.cpu.layer.steps import finish, place_and_attend, project
from pagemill.kernels.cpu.matmul.kinds import KINDS, KindName
from pagemill.kernels.types.layer_cache import LayerCache, allocate_layer
from pagemill.kernels.types.metadata import AttentionMetadata, warm_up_metadata

# Addresses of cos and sin, the stride of their rows, and half of the rotary dimension.
Angles = tuple[int, int, int, int]
NO_ROTATION: Angles = (0, 0, 0, 0)


def angles_of(rotation: tuple[torch.Tensor, torch.Tensor]) -> Angles:
    """Return the `Angles` of cos and sin, fp32 [num_tokens, any] of one stride; cos is as wide as the rotation."""
    cos, sin = rotation
    assert cos.dtype is sin.dtype is torch.float32
    assert cos.stride() == sin.stride()
    assert cos.stride(1) == 1
    return cos.data_ptr(), sin.data_ptr(), cos.stride(0), cos.shape[1] // 2


@jit
def run_layers(kind, element, layers, steps, hidden, cos, sin, stride, half, num_threads):
    """Replace `hidden` with the last layer's output; `steps` are the step's records, one per group of layers."""
    for i in range(len(layers)):
        layer = layers[i : i + 1]
        step = steps[layer[0].group : layer[0].group + 1]
        project(kind, layer, step, hidden, num_threads)
        place_and_attend(element, layer, step, cos, sin, stride, half * layer[0].rotates, num_threads)
        finish(kind, layer, step, hidden, i + 1 < len(layers), num_threads)


# These are separate Kernels, which `run_layers` and `place_and_attend` call. Matmuls are then not compiled
# again for every cache dtype, nor attention for every kind of matmul. The slowest to compile come first.
PARTS = ("prefill", "finish", "project", "decode", "place_and_attend")


def compile_part(name: str, *, kind: KindName, cache_dtype: torch.dtype) -> None:
    """Compile one of the parts, or load it from disk."""
    number, element = KINDS[kind], element_of(cache_dtype, rounds=kind != "fp32")
    layer, step = np.zeros(1, LAYER), np.zeros(1, STEP)
    kernel, arguments = {
        "prefill": (prefill, _attention_arguments(prefill, element)),
        "decode": (decode, _attention_arguments(decode, element)),
        "project": (project, (number, layer, step, 0, 1)),
        "place_and_attend": (place_and_attend, (element, layer, step, *NO_ROTATION, 1)),
        "finish": (finish, (number, layer, step, 0, False, 1)),
    }[name]
    kernel.compile(tuple(map(numba.typeof, arguments)))


def _attention_arguments(kernel: Any, element: Any) -> tuple[Any, ...]:
    others = {"element": element, "scale": 0.0, "softcap": 0.0}
    return tuple(others.get(name, 0) for name in inspect.signature(kernel.py_func).parameters)


class LayerStack:
    """Runs layers in order. They have one kind of matmuls, and caches of one dtype."""

    def __init__(self, layers: Sequence[DecoderLayer], buffers: StepBuffers) -> None:
        self.layers, self._buffers = layers, buffers
        self._records = np.zeros(len(layers), LAYER)
        self._caches: list[LayerCache | None] = [None] * len(layers)
        (kind,) = {layer.weights.qkv.kind for layer in layers}
        (self._rounds,) = {layer.scoring.rounds_to_cache for layer in layers}
        self.kind: KindName = kind
        self._number, self._element = KINDS[kind], element_of(torch.float32)
        for record, layer in zip(self._records, layers, strict=True):
            describe(record, layer)
            buffers.fit(layer.weights)

    def run(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        read_tokens: torch.Tensor | None = None,
    ) -> None:
        """Replace `hidden` [num_tokens, hidden_size], fp32 and contiguous, with the last layer's output.

        Args:
            rotation: cos and sin, rows of num_tokens. The width of cos is the rotary dimension; only the first half of
                both is read.
            caches: one per layer.
            metadata: that of the first group of layers, including the others'.
            read_tokens: [any] int64, ascending: the tokens whose output is used. The output of others is undefined, but
                their keys and values are written to the caches. None = all.
        """
        assert hidden.dtype is torch.float32
        assert hidden.is_contiguous()
        for i, cache in enumerate(caches):
            if cache is not self._caches[i]:
                self._point_at(i, cache)
        self._buffers.begin(metadata, len(hidden))
        self._buffers.read(len(hidden), read_tokens)
        run_layers(
            self._number, self._element, self._records, self._buffers.records, hidden.data_ptr(), *angles_of(rotation),
            use_torch_threads(),
        )  # fmt: skip

    def warm_up(self, block_size: int, cache_dtype: torch.dtype) -> None:
        """Compile the layers for caches of this dtype, or load them from disk."""
        weights = self.layers[0].weights
        cache = allocate_layer(1, weights.num_kv_heads, block_size, weights.head_dim, cache_dtype)
        hidden, angles = torch.zeros(3, len(weights.input_norm)), torch.zeros(3, weights.head_dim)
        self.run(hidden, (angles, angles), [cache] * len(self.layers), warm_up_metadata())

    def _point_at(self, i: int, cache: LayerCache) -> None:
        self._caches[i] = cache
        point_at(self._records[i], cache)
        self._element = element_of(cache.keys.dtype, rounds=self._rounds)
