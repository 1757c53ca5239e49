"""Media of a prompt, whose vectors replace the embeddings of placeholder tokens. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.engine.errors import InvalidRequest


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One picture of a prompt, prepared for the model's encoder. Picklable."""

    offset: int
    """The position of its first placeholder among the prompt's tokens."""
    length: int
    """Number of tokens from its first to its last placeholder, possibly with others between them (rows of tiles)."""
    digest: bytes
    """32 bytes, of the picture's bytes and the processor's settings: equal digests mean equal vectors."""
    inputs: Mapping[str, Any]
    """The encoder's arguments by name, numpy arrays, e.g. `pixel_values` and `image_grid_thw`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its inputs."""
        return sum(int(array.nbytes) for array in self.inputs.values())


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """All media of a prompt, and the rotary positions that follow from them."""

    items: tuple[MediaItem, ...]
    """In the order of their offsets, without overlaps."""
    places: tuple[Any, ...] = ()
    """For each item, [num_vectors] int64, numpy: the positions of its placeholders in the prompt, ascending."""
    positions: Any = None
    """[3, num_prompt_tokens] int64, numpy: the prompt's rotary positions. None: those of a text."""
    shift: int = 0
    """The rotary position of a generated token, minus its index."""

    def content_key(self, start: int, end: int) -> bytes:
        """Return the media key of the tokens at positions start..end-1; empty for text."""
        return b"".join(
            item.digest + (item.offset - start).to_bytes(8, "little", signed=True)
            for item in self.items
            if item.offset < end and start < item.offset + item.length
        )

    @property
    def end(self) -> int:
        """The position after the last placeholder."""
        return max(item.offset + item.length for item in self.items)


def check_items(items: tuple[MediaItem, ...], num_tokens: int) -> None:
    """Raise `InvalidRequest` unless the items are in order and inside a prompt of this length."""
    end = 0
    for item in items:
        if (
            item.length < 1
            or item.offset < end
            or item.offset + item.length > num_tokens
            or len(item.digest) != 32
        ):
            raise InvalidRequest("media: the items overlap, are out of order, or are outside of the prompt")
        end = item.offset + item.length
