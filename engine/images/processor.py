"""Converts pictures to placeholders in the prompt and arguments of the model's encoder.

A picture is hostile input, and decoders are native code. They run in a process with limits on CPU time and memory
(`child.py`), which starts with the first picture.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagemill.engine.byte_cache import ByteCache
from pagemill.engine.child_messages import pack
from pagemill.engine.errors import InvalidImage, UnsupportedFeature
from pagemill.engine.images.child import CALL_S, LOAD_S, MEMORY_MIB
from pagemill.engine.limited_process import Exceeded, LimitedProcess, Refused
from pagemill.engine.text.pictures import Markers, Picture

if TYPE_CHECKING:
    import numpy.typing as npt

CACHE_BYTES = 256 << 20
"""Limit of prepared pictures cached for further prompts."""
MAX_PROMPT_BYTES = 512 << 20
"""Limit of the arrays of one prompt's pictures."""
DEFAULT_MAX_PIXELS = 64 << 20
_MAX_REASON = 300
_FILES = ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
"""Files of a processor, in addition to its tokenizer's vocabulary."""


class ImageProcessor:
    """Prepares pictures for one model. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        *,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        call_s: float = CALL_S,
        memory_mib: int = MEMORY_MIB,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Create it without a process.

        Args:
            directory: the model's folder.
            max_pixels: limit for a picture, before it is decoded.
            call_s: CPU time for a picture, in seconds.
            memory_mib: memory of the process in addition to that of its libraries.
            cache_bytes: limit of cached prepared pictures.
        """
        self.directory, self._max_pixels = directory, max_pixels
        self._process = _ImageProcess(directory, call_s, memory_mib, max_pixels)
        self._cache: ByteCache[bytes, Picture] = ByteCache(
            cache_bytes, lambda digest, picture: len(digest) + picture.num_bytes
        )
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Omit the process and cached state."""
        return _make, (self.directory, self._max_pixels)

    def close(self) -> None:
        """Stop the process. The next picture starts another."""
        self._process.close()

    def read(self, images: Sequence[bytes]) -> Iterator[Picture]:
        """Prepare the pictures of one prompt one by one, in their order.

        Raises:
            InvalidImage: one of them cannot be decoded, or exceeds a limit.
            UnsupportedFeature: Pillow is missing, or the model's processor can't be loaded.
        """
        if find_spec("PIL") is None:
            raise UnsupportedFeature("images require Pillow on the worker: pip install 'pagemill[images]'")
        num_bytes = 0
        for number, data in enumerate(images, start=1):
            picture = self._read(number, data, is_alone=len(images) == 1)
            num_bytes += picture.num_bytes
            if num_bytes > MAX_PROMPT_BYTES:
                raise InvalidImage(
                    f"image {number}: the prompt's images have more than {MAX_PROMPT_BYTES >> 20} MiB as the model's "
                    "arrays; send fewer or smaller ones"
                )
            yield picture

    @property
    def markers(self) -> Markers:
        """The tokens of pictures. Raises UnsupportedFeature if the model's processor can't be loaded."""
        with self._lock:
            return self._process.markers()

    def _read(self, number: int, data: bytes, *, is_alone: bool) -> Picture:
        with self._lock:  # the process serves one call at a time: an equal picture may be ready then
            is_alone = not self._process.markers().sees_others or is_alone
            digest = hashlib.sha256(self._fingerprint + bytes([is_alone]) + data).digest()
            if (known := self._cache.get(digest)) is not None:
                return known
            try:
                text, count, inputs = self._process.read(data, is_alone)
            except (Refused, Exceeded) as error:
                raise InvalidImage(f"image {number}: {str(error)[:_MAX_REASON]}") from None
            picture = Picture(digest, text, count, inputs)
            self._cache.put(digest, picture)
            return picture

    @cached_property
    def _fingerprint(self) -> bytes:
        """A digest of all inputs of a picture's preparation, except the picture."""
        from importlib.metadata import version

        hashed = hashlib.sha256(f"{version('transformers')} {version('pillow')} ".encode())
        for name in _FILES:
            file = self.directory / name
            hashed.update(hashlib.sha256(file.read_bytes() if file.is_file() else b"").digest())
        return hashed.digest()


class _ImageProcess(LimitedProcess):
    def __init__(self, directory: Path, call_s: float, memory_mib: int, max_pixels: int) -> None:
        super().__init__(
            "pagemill.engine.images.child",
            (call_s, memory_mib, max_pixels),
            f"decoding takes more than {call_s:g} s of CPU time or {memory_mib} MiB",
        )
        self._directory = directory
        self._markers: Markers | None = None
        self._failure: str | None = None

    def markers(self) -> Markers:
        """Return the processor's properties. Raises UnsupportedFeature if it cannot be loaded."""
        if self._failure is not None:
            raise UnsupportedFeature(self._failure)
        if self._markers is None:
            try:
                self._call("greet")
            except (Refused, Exceeded) as error:
                self.close()
                reason = f"the model's image processor can't be loaded: {str(error)[:_MAX_REASON]}"
                self._failure = reason if isinstance(error, Refused) else None
                raise UnsupportedFeature(reason) from None
        assert self._markers is not None
        return self._markers

    def read(self, data: bytes, is_alone: bool) -> tuple[str, int, dict[str, npt.NDArray[Any]]]:
        """Prepare a picture. Raises Refused or Exceeded."""
        import numpy as np

        text, count, arrays = self._call("read", data, is_alone)
        inputs = {
            name: np.frombuffer(bytearray(content), dtype).reshape(shape)
            for name, dtype, shape, content in arrays
        }
        return text, count, inputs

    def _start(self) -> None:
        super()._start()
        limits = f"loading takes more than {LOAD_S:g} s of CPU time"
        self._markers = Markers(*self._answer(pack("load", str(self._directory)), limits))


def _make(directory: Path, max_pixels: int) -> ImageProcessor:
    return ImageProcessor(directory, max_pixels=max_pixels)
