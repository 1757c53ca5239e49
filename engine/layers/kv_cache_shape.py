"""The shape of a block of a model's KV cache, and the groups of layers with separate blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pagemill.engine.layers.latent.shape import LatentShape
from pagemill.engine.layers.recurrent import StateShape, state_bytes
from pagemill.kernels.types.layer_cache import largest_number

_MOST_GROUPS = 8
"""Each group has separate tables, on the host and on the device."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose blocks are allocated and freed together."""

    window: int | None
    """The window of `first_visible`; None: a layer reads every key."""
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    groups: tuple[LayerGroup, ...] = ()
    """The groups, which contain every layer once; empty: all layers read everything."""
    latent: LatentShape | None = None
    """Size of the latents that are the keys of the only KV head; their values are not stored a second time."""
    state: StateShape = ()
    """A sequence's state in the recurrent layers, which are not counted as layers here."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The groups' windows."""
        return tuple(group.window for group in self.groups) or (None,)

    @property
    def pool_layers(self) -> int:
        """Number of layers with tensors in the pool: each group uses one of them per layer."""
        return max((len(group.layers) for group in self.groups), default=self.num_layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state; 0: the model does not have one."""
        return state_bytes(self.state)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group, keys and values."""
        kinds = 2 if self.latent is None else 1
        return self._block_bytes(kinds * self.num_kv_heads, kinds * self.num_kv_heads * self.head_dim)

    @property
    def expanded_block_bytes(self) -> int | None:
        """The same with all heads' keys and values in place of latents; None: the cache has no latents."""
        if self.latent is None:
            return None
        return self._block_bytes(2 * self.latent.num_heads, self.latent.expanded)

    def _block_bytes(self, vectors: int, numbers: int) -> int:
        """Return the bytes of a block from a token's number of vectors and their total size."""
        scale_bytes = 0 if largest_number(self.dtype) is None else torch.float32.itemsize
        token_bytes = numbers * self.dtype.itemsize + vectors * scale_bytes
        return self.pool_layers * self.block_size * token_bytes


def layer_groups(windows: Sequence[int | None], max_model_len: int) -> tuple[LayerGroup, ...]:
    """Divide layers into groups of one window each and nearly equal size, so that they share the pool's blocks.

    Args:
        windows: per layer. Windows not smaller than `max_model_len` count as none.
    """
    if not windows:
        return ()
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window if window and abs(window) < max_model_len else None, []).append(layer)
    sizes = [len(members) for members in layers.values()]
    size = min(_possible_sizes(sizes), key=lambda size: (_missing_share(sizes, size), -size))
    return tuple(
        LayerGroup(window, tuple(members[first : first + size]))
        for window, members in layers.items()
        for first in range(0, len(members), size)
    )


def _possible_sizes(sizes: Sequence[int]) -> Iterator[int]:
    most = max(_MOST_GROUPS, len(sizes))
    return (size for size in range(1, max(sizes) + 1) if sum(-(-count // size) for count in sizes) <= most)


def _missing_share(sizes: Sequence[int], size: int) -> float:
    """Return the largest share of unused blocks over the kinds of layers."""
    return max(1 - count / (-(-count // size) * size) for count in sizes)
