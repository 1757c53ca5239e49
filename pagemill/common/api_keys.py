"""Keys of other services, from files: they never appear in a job, log or error."""

from __future__ import annotations

import re
from pathlib import Path

MAX_KEY_BYTES = 4096
_KEY = re.compile(r"[\x21-\x7e]+")


def read_key(file: Path | None) -> str:
    """Return the API key in a file; empty without one. Raises ValueError, which does not quote it."""
    if file is None:
        return ""
    try:
        with file.open("rb") as opened:
            key = opened.read(MAX_KEY_BYTES + 1).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise ValueError("the key file cannot be read as ASCII text") from None
    if not is_key(key):
        raise ValueError(f"the key file should have one line, with a key of up to {MAX_KEY_BYTES} characters")
    return key


def is_key(text: str) -> bool:
    """Return whether a text can be a key, and therefore part of a header."""
    return len(text) <= MAX_KEY_BYTES and _KEY.fullmatch(text) is not None
