"""The store: all files below one URL of fsspec (`s3://bucket/prefix`, `file:///mnt/jobs`).

Credentials come from the environment or fsspec's configuration, never from the URL, so that no name contains them.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pagemill.producer.wire.process.interruption import interruption
from pagemill.producer.wire.schema.errors import InvalidAddress, StoreError
from pagemill.producer.wire.store.stub import Reference

T = TypeVar("T")

URL_VARIABLE = "PAGEMILL_STORE_URL"
OVER_VARIABLE = "PAGEMILL_STORE_OVER_BYTES"
DEFAULT_OVER_BYTES = 256 << 10
"""Larger payloads and results are written to the store, if there is one."""
MAX_STORED_BYTES = 64 << 20
"""Limit on one payload or result in a store."""
CONNECT_S, READ_S = 5, 20
"""Timeouts for S3; other file systems have their own."""
_PART = r"[A-Za-z0-9_@-][A-Za-z0-9._@-]*"
_NAME = re.compile(f"{_PART}(/{_PART}){{0,7}}")
"""Paths below the store's URL. No part starts with a dot, so paths cannot lead upwards."""


class Store:
    """Reads, writes and deletes files below one URL. Thread-safe; every method may raise StoreError."""

    def __init__(self, url: str, over_bytes: int = DEFAULT_OVER_BYTES) -> None:
        """Raises InvalidAddress for an invalid URL, without quoting it."""
        self.url = check_store_url(url)
        self.over_bytes = over_bytes

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @classmethod
    def from_environment(cls) -> Store | None:
        """Return the store that PAGEMILL_STORE_URL names, if it is set. Raises InvalidAddress."""
        url = os.environ.get(URL_VARIABLE)
        if not url:
            return None
        over = os.environ.get(OVER_VARIABLE) or str(DEFAULT_OVER_BYTES)
        if not (over.isascii() and over.isdigit()):
            raise InvalidAddress(f"{OVER_VARIABLE} is a number of bytes")
        return cls(url, int(over))

    def takes(self, size: int) -> bool:
        """Return whether data of that many bytes belongs here."""
        return size > self.over_bytes

    def new_uri(self, queue: str, kind: str, job_id: str) -> str:
        """Return a name that has never been used: a file is written only once."""
        # A queue's name or an id may start with a dot.
        return f"{self.url}/q-{queue}/{kind}/j-{job_id}.{secrets.token_hex(6)}"

    def owns(self, uri: str) -> bool:
        """Return whether the URI is below this store's URL."""
        return uri.startswith(self.url + "/") and _NAME.fullmatch(uri[len(self.url) + 1 :]) is not None

    def write(self, uri: str, data: bytes) -> None:
        """Write a file."""
        self._at(uri, lambda fs, path: fs.pipe_file(path, data))

    def read(self, reference: Reference) -> bytes:
        """Return a file's content. Raises StoreError, which is not retryable if it is missing, changed or too large."""
        if reference.size > MAX_STORED_BYTES:
            raise StoreError(f"a stored file has {reference.size:,} bytes, the limit is {MAX_STORED_BYTES:,}")
        # One additional byte shows that a file has grown, without reading all of it.
        end = reference.size + 1
        data: bytes = self._at(reference.uri, lambda fs, path: fs.cat_file(path, start=0, end=end))
        if len(data) != reference.size or hashlib.sha256(data).hexdigest() != reference.sha256:
            raise StoreError("a stored file is not what was written: its size or hash differs")
        return data

    def delete(self, uri: str) -> None:
        """Delete a file; a missing one is not an error."""
        try:
            self._at(uri, lambda fs, path: fs.rm_file(path))
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise

    def _at(self, uri: str, operation: Callable[[Any, str], T]) -> T:
        if not self.owns(uri):
            raise StoreError("a stored file is outside the store that is configured here", "unset")
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise StoreError(
                "fsspec is missing: pip install 'pagemill[s3]', or fsspec itself for files", "away"
            ) from None
        try:
            fs, path = url_to_fs(uri, **_options(self.url))
            if "file" in fs.protocol:
                _check_links(url_to_fs(self.url)[1], path)
            return operation(fs, path)
        except StoreError:
            raise
        except FileNotFoundError as error:
            raise StoreError("a stored file is missing") from error
        except Exception as error:
            if (raised := interruption(error)) is not None:
                raise raised from None
            # Never the message, which may contain addresses, or the credentials of a request.
            raise StoreError(f"the store fails with {type(error).__name__}", "away") from error


def reference_to(uri: str, data: bytes, tenant: str = "default") -> Reference:
    """Return the reference to a file with this content."""
    return Reference(uri=uri, sha256=hashlib.sha256(data).hexdigest(), size=len(data), tenant=tenant)


def check_store_url(url: str) -> str:
    """Return a store's URL without a trailing slash. Raises InvalidAddress, a ValueError, which does not quote it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidAddress("the store's URL is invalid") from None
    if not parts.scheme or "://" not in url or not (parts.netloc or parts.path.strip("/")):
        raise InvalidAddress(
            "the store's URL is one of fsspec, such as s3://bucket/prefix or file:///mnt/jobs"
        )
    if "@" in parts.netloc or parts.query or parts.fragment or "::" in url:
        raise InvalidAddress(
            "the store's URL names a place alone: credentials and options belong in the environment"
        )
    if ".." in parts.path.split("/"):
        raise InvalidAddress("the store's URL has no ..")
    return url.rstrip("/")


def _check_links(root: str, path: str) -> None:
    """Raise StoreError if symbolic links lead a local path out of the store's folder."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise StoreError(
            "a symbolic link leads a stored file out of the store: replace the link by a folder, or use the "
            "link's target as the store's URL",
            "unset",
        )


def _options(url: str) -> dict[str, Any]:
    if url.startswith("file://"):
        return {"auto_mkdir": True}
    if url.startswith(("s3://", "s3a://")):
        patience = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": {"max_attempts": 2}}
        return {"config_kwargs": patience}
    return {}
