"""Pictures in messages: parts `{"type": "image", "image": ...}` with bytes, and then with a prepared `Picture`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pagemill.engine.errors import InvalidRequest, UnsupportedFeature
from pagemill.engine.media import MediaItem

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A prepared picture."""

    digest: bytes
    """The digest of the `MediaItem`."""
    text: str
    """The picture's replacement in the prompt."""
    num_placeholders: int
    """Tokens of the text whose embeddings are replaced by the encoder's vectors."""
    inputs: Mapping[str, npt.NDArray[Any]]
    """The encoder's arguments."""

    @property
    def num_bytes(self) -> int:
        """Approximate number of bytes in memory."""
        return len(self.text) + sum(array.nbytes for array in self.inputs.values()) + 1000


@dataclass(frozen=True, slots=True)
class Markers:
    """The tokens of pictures in prompts."""

    token: str
    """The text that a chat template writes for a picture."""
    placeholder_id: int
    bos: str
    """The token at the start of a text, if the tokenizer has one."""
    sees_others: bool
    """True if a picture is prepared differently when the prompt has others."""


class ImageReader(Protocol):
    """Interface for preparing pictures, implemented by `engine/images/processor.py`."""

    @property
    def markers(self) -> Markers: ...

    def read(self, images: Sequence[bytes]) -> Iterator[Picture]:
        """Prepare the pictures of one prompt one by one. Raises InvalidRequest."""
        ...


def image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts with images, in their order. Raises InvalidRequest for malformed parts."""
    for message in messages:
        for part in _parts(message):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("text", "image") or kind not in part:
                raise InvalidRequest("the parts of a message must be texts and images")
            if kind == "image":
                if message["role"] != "user":
                    raise UnsupportedFeature(f"images in a message of the role {message['role']}; use user")
                yield part


def with_pictures(
    messages: Sequence[Mapping[str, Any]], pictures: Sequence[Picture]
) -> list[Mapping[str, Any]]:
    """Return messages with prepared pictures in place of the images."""
    left = iter(pictures)
    return [_replaced(message, lambda: {"image": next(left)}) for message in messages]


def as_shown(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages in the form that chat templates read, without image data; parts without images as one text.

    Raises:
        InvalidRequest: a part is malformed.
    """
    for _ in image_parts(messages):
        pass  # checks all parts
    return [_joined(_replaced(message, dict)) for message in messages]


def expanded(text: str, pictures: Sequence[Picture], markers: Markers) -> str:
    """Return a rendered chat with each picture's mark replaced by its placeholders.

    Raises:
        InvalidRequest: the numbers of marks and pictures differ.
    """
    pieces = text.split(markers.token)
    if len(pieces) != len(pictures) + 1:
        raise InvalidRequest(
            f"the rendered chat has {markers.token} {len(pieces) - 1} times for {len(pictures)} images: texts must not "
            "contain it, and the chat template must show every image once"
        )
    return pieces[0] + "".join(
        picture.text + piece for picture, piece in zip(pictures, pieces[1:], strict=True)
    )


def place(
    token_ids: Sequence[int], pictures: Sequence[Picture], placeholder_id: int
) -> tuple[MediaItem, ...]:
    """Return the media of a prompt's tokens.

    Raises:
        InvalidRequest: the tokens do not match the placeholders of the pictures.
    """
    places = [position for position, token in enumerate(token_ids) if token == placeholder_id]
    if len(places) != sum(picture.num_placeholders for picture in pictures):
        raise InvalidRequest(
            "the prompt's tokens do not match its images: truncate_prompt_tokens must not cut an image, and texts must "
            "not contain image tokens"
        )
    items, begin = [], 0
    for picture in pictures:
        own = places[begin : begin + picture.num_placeholders]
        begin += len(own)
        items.append(MediaItem(own[0], own[-1] - own[0] + 1, picture.digest, picture.inputs))
    return tuple(items)


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return a message's parts; a text has none. Invalid messages are left to the chat template's checks."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()


def _joined(message: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = _parts(message)
    if not parts or not all(part["type"] == "text" for part in parts):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def _replaced(message: Mapping[str, Any], image: Callable[[], dict[str, Any]]) -> Mapping[str, Any]:
    if not (parts := _parts(message)):
        return message
    content = [{"type": "image"} | image() if part["type"] == "image" else dict(part) for part in parts]
    return {**message, "content": content}
