"""Which jobs share a prefix: a worker that pulls them together computes the prefix once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache

PREFIX_CHARS = 256
"""Of a prompt without a system message: its beginning stands for the template it was made with."""
PREFIX_TOKENS = 64


def prompt_affinity(text: str) -> str | None:
    """8 hex digits, equal for prompts that begin alike; None for one that is too short to share much."""
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
    return hashlib.blake2b(prefix.encode(), digest_size=4).hexdigest()
