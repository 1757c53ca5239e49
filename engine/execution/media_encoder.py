"""Encodes pictures with a model's vision tower, and caches the vectors of recent ones."""

from __future__ import annotations

import inspect
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.layers.media_step import MediaStep
from pagemill.engine.media import MediaItem, PromptMedia, check_items
from pagemill.engine.models.vision import Vision
from pagemill.engine.outputs import MediaStats


@dataclass(frozen=True, slots=True)
class Vectors:
    """A picture as the language model reads it, a row per placeholder."""

    rows: torch.Tensor  # [num_vectors, hidden_size]
    deep: tuple[torch.Tensor, ...]  # [num_vectors, hidden_size] each, for the first decoder layers


class MediaEncoder:
    """Vectors of pictures by digest, least recently used ones evicted first. Owned by the engine's thread."""

    def __init__(self, vision: Vision, max_bytes: int, device: torch.device, dtype: torch.dtype) -> None:
        """`max_bytes`: limit of cached vectors; those that a request needs next are never evicted."""
        self.max_bytes = max_bytes
        self._vision = vision
        self._device, self._dtype = device, dtype
        self._kept: OrderedDict[bytes, Vectors] = OrderedDict()
        self._holders: Counter[bytes] = Counter()
        """Digest -> requests that will read its vectors."""
        self._held: dict[bytes, int] = {}
        """Digest -> bytes of its vectors, for digests with a holder."""
        self._stats = MediaStats(capacity_bytes=max_bytes)

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._vision.module.parameters())

    def place(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> PromptMedia:
        """Return a prompt's media with the positions of their vectors. Raises `InvalidRequest` if they do not match."""
        items = tuple(items)
        check_items(items, len(token_ids))
        ids = np.asarray(token_ids, dtype=np.int64)
        are_placeholders = ids == self._vision.placeholder_id
        places = []
        for item in items:
            places.append(
                item.offset + np.flatnonzero(are_placeholders[item.offset : item.offset + item.length])
            )
        if sum(map(len, places)) != int(are_placeholders.sum()) or any(not len(place) for place in places):
            raise InvalidRequest("media: the prompt's placeholders are not those of its items")
        if self._vision.sections is None:
            return PromptMedia(items, tuple(places))
        positions = self._positions(ids, are_placeholders, items)
        return PromptMedia(items, tuple(places), positions, int(positions.max()) + 1 - len(ids))

    def _positions(self, ids: Any, are_placeholders: Any, items: tuple[MediaItem, ...]) -> Any:
        rope_index = self._vision.module.get_rope_index
        names = inspect.signature(rope_index).parameters
        try:
            grids = np.concatenate([item.inputs["image_grid_thw"].reshape(-1, 3) for item in items])
            given = {
                "input_ids": torch.from_numpy(ids)[None],
                "image_grid_thw": torch.from_numpy(grids.astype(np.int64)),
                "mm_token_type_ids": torch.from_numpy(are_placeholders.astype(np.int64))[None],
            }
            positions, _ = rope_index(**{name: value for name, value in given.items() if name in names})
        except Exception as error:  # it may raise any error for grids that do not match the placeholders
            raise InvalidRequest(f"media: the prompt's positions can't be computed: {error}") from error
        return positions[:, 0].numpy().astype(np.int64)

    def has(self, item: MediaItem) -> bool:
        return item.digest in self._kept

    def hold(self, media: PromptMedia) -> bool:
        """Keep a prompt's vectors, once encoded, until `release`. Return False if space is insufficient."""
        row_bytes = self._vision.hidden_size * self._dtype.itemsize * (1 + self._vision.num_deep_layers)
        sizes = {
            item.digest: len(places) * row_bytes
            for item, places in zip(media.items, media.places, strict=True)
            if item.digest not in self._held
        }
        if self._held and sum(self._held.values()) + sum(sizes.values()) > self.max_bytes:
            return False
        self._held |= sizes
        self._holders.update({item.digest for item in media.items})
        return True

    def release(self, media: PromptMedia) -> None:
        self._holders.subtract({item.digest for item in media.items})
        self._holders += Counter()  # drops zeros
        self._held = {digest: size for digest, size in self._held.items() if digest in self._holders}
        self._evict()

    @torch.inference_mode()
    def vectors(self, item: MediaItem, num_vectors: int) -> Vectors:
        """Return a picture's vectors, cached or encoded. Raises `InvalidRequest` if their number does not match."""
        if (kept := self._kept.get(item.digest)) is not None:
            self._kept.move_to_end(item.digest)
            return kept
        started = time.perf_counter()
        vectors = self._encoded(item)
        if len(vectors.rows) != num_vectors:
            raise InvalidRequest(
                f"media: a picture gives {len(vectors.rows)} vectors, its placeholders are {num_vectors}"
            )
        self._stats.encoded += 1
        self._stats.encoder_seconds += time.perf_counter() - started
        self._kept[item.digest] = vectors
        self._stats.used_bytes += _num_bytes(vectors)
        self._evict()
        return vectors

    def count_hits(self, count: int) -> None:
        """Count a request's pictures whose vectors, or whose KV, were cached."""
        self._stats.cache_hits += count

    def stats(self) -> MediaStats:
        return replace(self._stats)

    def step(self, inserts: Sequence[Any], tokens: torch.Tensor, positions: torch.Tensor | None) -> MediaStep:
        """Return a step's vectors. Raises `InvalidRequest`: see `vectors`.

        Args:
            inserts: an `Insert` for each picture whose placeholders the step computes.
            tokens: [num_vectors] int64 on the device, the step's tokens that they replace.
            positions: see `MediaStep`.
        """
        found = [(self.vectors(one.item, one.num_vectors), one.first, one.end) for one in inserts]
        return MediaStep(
            tokens,
            torch.cat([vectors.rows[first:end] for vectors, first, end in found])
            if found
            else torch.empty(0, self._vision.hidden_size, device=self._device),
            [
                torch.cat([vectors.deep[layer][first:end] for vectors, first, end in found])
                for layer in range(self._vision.num_deep_layers if found else 0)
            ],
            positions,
            self._vision.sections,
        )

    def _encoded(self, item: MediaItem) -> Vectors:
        inputs = {name: self._tensor(array) for name, array in item.inputs.items()}
        output = self._vision.module.get_image_features(**inputs)
        rows = _rows(getattr(output, "pooler_output", output), self._vision.hidden_size)
        deep = getattr(output, "deepstack_features", None) or ()
        return Vectors(rows, tuple(_rows(layer, self._vision.hidden_size) for layer in deep))

    def _tensor(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)

    def _evict(self) -> None:
        for digest in list(self._kept):
            if self._stats.used_bytes <= self.max_bytes:
                return
            if digest not in self._holders:
                self._stats.used_bytes -= _num_bytes(self._kept.pop(digest))


def _rows(features: Any, hidden_size: int) -> torch.Tensor:
    """Return vectors that transformers returns as one tensor, or as one per picture or tile."""
    parts = [features] if isinstance(features, torch.Tensor) else features
    return torch.cat([part.reshape(-1, hidden_size) for part in parts])


def _num_bytes(vectors: Vectors) -> int:
    return sum(tensor.nbytes for tensor in (vectors.rows, *vectors.deep))
