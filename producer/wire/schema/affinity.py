"""Which jobs share a prefix: a worker that pulls them together computes the prefix once."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Sequence
from functools import lru_cache

PREFIX_CHARS = 256
"""Of a prompt without a system message: its beginning stands for the template it was made with."""
PREFIX_TOKENS = 64
_ALPHABET = string.digits + string.ascii_letters


def prompt_affinity(text: str) -> str | None:
    """Three letters or digits, equal for prompts that begin alike; None for one that is too short to share much."""
    return _digest(text[:PREFIX_CHARS]) if len(text) > PREFIX_CHARS else None


def token_affinity(token_ids: Sequence[int]) -> str | None:
    """As `prompt_affinity`."""
    first = token_ids[:PREFIX_TOKENS]
    return _digest(",".join(map(str, first))) if len(token_ids) > PREFIX_TOKENS else None


def chat_affinity(turns: Iterable[tuple[str, str]]) -> str | None:
    """Of (role, content) pairs: the system messages they begin with, else the beginning of the first one."""
    system: list[str] = []
    for role, content in turns:
        if role != "system":
            return _digest("\0".join(system)) if system else prompt_affinity(content)
        system.append(content)
    return _digest("\0".join(system))


@lru_cache(maxsize=1024)
def _digest(prefix: str) -> str:
    # Beside the id of every waiting job, so it is short. Among the 64 jobs that a pull looks at, two different
    # prefixes rarely share one of 238,328 names, and then a job goes first for nothing, no more.
    number = int.from_bytes(hashlib.blake2b(prefix.encode(), digest_size=8).digest())
    letters = []
    for _ in range(3):
        number, place = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[place])
    return "".join(letters)
