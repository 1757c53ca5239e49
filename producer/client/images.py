"""`images=` next to a prompt or messages: images in several forms become parts of a message."""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.images import MAX_IMAGE_BYTES, MAX_IMAGES, is_fetched
from pagemill.producer.wire.schema.job import Job, Message

_SIGNATURES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
)
MAX_PATH: Final = 4096
"""Maximum characters of a path."""
FORMATS: Final = "PNG, JPEG, WebP, GIF or BMP"
_PNG_MODES: Final = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"})


class SavedImage(Protocol):
    """The used part of `PIL.Image.Image`."""

    @property
    def mode(self) -> str: ...

    def convert(self, mode: str) -> Any: ...

    def save(self, fp: Any, format: str) -> None: ...


Image: TypeAlias = bytes | bytearray | memoryview | os.PathLike[str] | str | SavedImage
"""An image's bytes, its file, a `PIL.Image`, or a `data:` or http(s) URL."""


def parse_job(fields: Mapping[str, Any]) -> Job:
    """Like `Job.parse`, for fields that may have `images`. Raises InvalidJob."""
    return Job.parse(with_images(fields) if "images" in fields else dict(fields))


def with_images(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's fields with `images` as parts of the last user's message; a prompt becomes a chat.

    The images precede the text.

    Raises:
        InvalidJob: there is no message of a user, or an image cannot be read; the message names its number.
    """
    rest = {name: value for name, value in fields.items() if name != "images"}
    given = fields["images"]
    if given is None or (isinstance(given, list | tuple) and not given):
        return rest
    images: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    if len(images) > MAX_IMAGES:
        raise _invalid(f"images: {len(images)} are given, the limit is {MAX_IMAGES}")
    messages = rest.get("messages")
    if rest.get("prompt") is not None and messages is None:
        messages = [{"role": "user", "content": rest.pop("prompt")}]
    if not isinstance(messages, list | tuple):
        raise _invalid("images: go with a prompt or with messages")
    parts = [
        {"type": "image_url", "image_url": {"url": _url(number, image)}}
        for number, image in enumerate(images)
    ]
    return rest | {"messages": _with_parts(list(messages), parts)}


def _with_parts(messages: list[Any], parts: list[dict[str, Any]]) -> list[Any]:
    for number in reversed(range(len(messages))):
        message = messages[number]
        if isinstance(message, Message):
            message = message.model_dump(exclude_none=True)
        if isinstance(message, Mapping) and message.get("role") == "user":
            content = message.get("content")
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
            messages[number] = {**message, "content": [*parts, *texts]}
            return messages
    raise _invalid("images: go with a user's message, and there is not one")


def _url(number: int, image: Any) -> str:
    if isinstance(image, str):
        if image[:5].lower() == "data:" or is_fetched(image):
            return image
        raise _invalid(
            f"images[{number}]: a text must be a data: or http(s) URL; give a file as a pathlib.Path"
        )
    try:
        return data_url(content_of(image))
    except InvalidJob as error:
        raise _invalid(f"images[{number}]: {error}") from error.__cause__


def content_of(image: Any) -> bytes:
    """Return the bytes of an image that is not a URL. Raises InvalidJob."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, os.PathLike):
        return read_image(Path(image))
    if callable(getattr(image, "save", None)) and isinstance(getattr(image, "mode", None), str):
        content = BytesIO()
        try:
            (image if image.mode in _PNG_MODES else image.convert("RGB")).save(content, format="PNG")
        except (OSError, ValueError) as error:
            raise _invalid(f"the picture cannot be saved as PNG: {error}") from error
        return content.getvalue()
    raise _invalid(f"an image is bytes, a path, a PIL.Image or a URL, not {type(image).__name__}")


def read_image(path: Path) -> bytes:
    """Return the bytes of an image file, up to one byte over the limit. Raises InvalidJob."""
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)  # a pipe would block
        content = b""
        if is_file:
            with path.open("rb") as file:
                content = file.read(MAX_IMAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _invalid(f"cannot read {path.name}: {reason}") from error
    if not is_file:
        raise _invalid(f"{path.name} is not a regular file")
    return content


def data_url(content: bytes) -> str:
    """Return the `data:` URL of an image. Raises InvalidJob if its format is unknown, or if it is too large."""
    if len(content) > MAX_IMAGE_BYTES:
        raise _invalid(f"the picture has more than the limit of {MAX_IMAGE_BYTES} bytes")
    if (kind := _mime_type(content)) is None:
        raise _invalid(f"the content is not a picture in {FORMATS}")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def base64_url(text: str) -> str | None:
    """Return the `data:` URL of an image in base64; None for other text, such as a path."""
    try:
        kind = _mime_type(binascii.a2b_base64(text[:16]))
        if len(text) < MAX_PATH:
            binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return None
    return None if kind is None else f"data:{kind};base64,{text}"


def _mime_type(content: bytes) -> str | None:
    for start, kind in _SIGNATURES:
        if content.startswith(start):
            return kind
    return "image/webp" if content[:4] == b"RIFF" and content[8:12] == b"WEBP" else None


def _invalid(message: str) -> InvalidJob:
    return InvalidJob(message, "invalid_image", "images")
