"""Images in a chat: the parts of a message's content, in OpenAI's form, and the bytes of `data:` URLs.

Only the form and size of an image are checked here. A worker decodes it in a separate process.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)

from pagemill.common.bounds import InvalidParameter

MAX_TEXT: Final = 1 << 20
"""Maximum characters of one text in a message."""
MAX_PARTS: Final = 1024
MAX_IMAGES: Final = 64
"""Maximum number of images of one job."""
MAX_IMAGE_BYTES: Final = 20 << 20
"""Maximum bytes of one image before base64 encoding."""
MAX_IMAGE_URL: Final = 8192
"""Maximum characters of an address that a worker fetches."""
IMAGE_TOKENS_GUESS: Final = 1024
"""Expected prompt tokens of an image if its model and size are unknown."""

_DATA = re.compile(r"data:(image/[\w.+-]{1,64})(?:;[\w.+-]{1,64}=[\w.+-]{1,64}){0,4};base64,", re.IGNORECASE)
_SHOWN_DATA = re.compile(r"data:(image/[\w.+-]{1,64})[^,\s\"'\\]{0,256},([A-Za-z0-9+/=_-]*)", re.IGNORECASE)


class InvalidImage(InvalidParameter):
    """An image cannot be read, or exceeds a limit. Messages never contain its URL."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "invalid_image")


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a `data:image/...;base64,` URL.

    Raises:
        InvalidImage: the URL has another form, holds no bytes, or more than `MAX_IMAGE_BYTES`.
    """
    match = _DATA.match(url)
    if match is None:
        raise InvalidImage("the URL of an image must start with data:image/<type>;base64, or with https://")
    most = 4 * -(-MAX_IMAGE_BYTES // 3)
    if len(url) - match.end() > most:
        raise _too_large((len(url) - match.end()) // 4 * 3)
    try:
        decoded = binascii.a2b_base64(url[match.end() :], strict_mode=True)
    except ValueError:  # also for characters that are not ASCII
        raise InvalidImage("the data: URL of an image is not valid base64") from None
    if not decoded:
        raise InvalidImage("the data: URL of an image is empty")
    if len(decoded) > MAX_IMAGE_BYTES:
        raise _too_large(len(decoded))
    return decoded


def _too_large(size: int) -> InvalidImage:
    return InvalidImage(f"an image has {size} bytes, the limit is {MAX_IMAGE_BYTES}")


def is_fetched(url: str) -> bool:
    """Return True for an http(s) address, which a worker would fetch."""
    return url[:8].lower().startswith(("http://", "https://"))


def _check_url(url: str) -> str:
    if not is_fetched(url):
        decode_data_url(url)
        return url
    if len(url) > MAX_IMAGE_URL:
        raise InvalidImage(f"the address of an image has {len(url)} characters, the limit is {MAX_IMAGE_URL}")
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host or not url.isprintable() or " " in url:
        raise InvalidImage("the address of an image is not a valid URL")
    return url


def image_digest(url: str) -> str:
    """Return a hash that is equal for equal image bytes, regardless of the type in their `data:` URL."""
    match = _DATA.match(url)
    content = url if match is None else url[match.end() :]
    return blake2b(content.encode(), digest_size=32).hexdigest()


def describe_image(url: str) -> str:
    """Return a description of an image: `[image/png, 12,345 bytes]`, or its address without the query."""
    if is_fetched(url):
        return f"[image {url.partition('?')[0].partition('#')[0]}]"
    return hide_images(url) if _SHOWN_DATA.match(url) else "[image]"


def hide_images(text: str) -> str:
    """Return a text in which every `data:` URL of an image is replaced by its description."""
    return _SHOWN_DATA.sub(_described, text) if "data:image/" in text.lower() else text


def _described(match: re.Match[str]) -> str:
    body = match[2]
    size = len(body) * 3 // 4 - (len(body) - len(body.rstrip("=")))
    return f"[{match[1].lower()}, {size:,} bytes]"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class TextPart(_Part):
    type: Literal["text"]
    text: Annotated[str, StringConstraints(strict=True, max_length=MAX_TEXT)]


class ImageUrl(_Part):
    url: Annotated[str, Field(strict=True), AfterValidator(_check_url)]
    """A `data:` URL of an image, or an http(s) address, which a worker fetches if its operator allows it."""
    detail: Annotated[Literal["auto", "low", "high"] | None, AfterValidator(lambda _: None)] = None
    """OpenAI's field; accepted and ignored."""


class ImagePart(_Part):
    type: Literal["image_url"]
    image_url: ImageUrl


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _type_of(value: Any) -> Any:
    return _member(value, "type")


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[ImagePart, Tag("image_url")],
    Discriminator(
        _type_of,
        custom_error_type="part_type",
        custom_error_message="the type of a part must be text or image_url",
    ),
]


def _joined(value: Any) -> Any:
    """Return parts that are all texts as one text, like OpenAI."""
    if not isinstance(value, list | tuple) or not value:
        return value
    texts = [_member(part, "text") for part in value if _type_of(part) == "text"]
    is_text = len(texts) == len(value) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if is_text else value


def _kind(value: Any) -> str:
    return "parts" if isinstance(value, list | tuple) else "text"


Content = Annotated[
    Annotated[str, StringConstraints(strict=True, max_length=MAX_TEXT), Tag("text")]
    | Annotated[tuple[Part, ...], Field(min_length=1, max_length=MAX_PARTS), Tag("parts")],
    Discriminator(_kind),
    BeforeValidator(_joined),
]
"""A text, or parts with at least one image."""


def texts_of(content: str | Sequence[TextPart | ImagePart] | None) -> Iterable[str]:
    """Yield the texts of a message's content."""
    if content is None or isinstance(content, str):
        return (content,) if content is not None else ()
    return (part.text for part in content if isinstance(part, TextPart))


def images_of(content: str | Sequence[TextPart | ImagePart] | None) -> tuple[str, ...]:
    """Return the URLs of the images in a message's content."""
    if content is None or isinstance(content, str):
        return ()
    return tuple(part.image_url.url for part in content if isinstance(part, ImagePart))
