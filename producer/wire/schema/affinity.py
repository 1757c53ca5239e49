"""Prefix affinity of jobs: a worker that pulls jobs with a common prefix together computes the prefix once."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Sequence
from functools import lru_cache

from pagemill.producer.wire.schema.templates import first_place

PREFIX_CHARS = 256
"""Leading characters that represent the template of a prompt without a system message."""
PREFIX_TOKENS = 64
_ALPHABET = string.digits + string.ascii_letters


def prompt_affinity(text: str) -> str | None:
    """Return three letters or digits, equal for prompts that share a prefix; None for a short prompt."""
    return _digest(text[:PREFIX_CHARS]) if len(text) > PREFIX_CHARS else None


def token_affinity(token_ids: Sequence[int]) -> str | None:
    """Like `prompt_affinity`, for token ids."""
    first = token_ids[:PREFIX_TOKENS]
    return _digest(",".join(map(str, first))) if len(token_ids) > PREFIX_TOKENS else None


def chat_affinity(turns: Iterable[tuple[str, str]]) -> str | None:
    """Like `prompt_affinity`, for (role, content) pairs: by leading system messages, or the first turn."""
    system: list[str] = []
    for role, content in turns:
        if role != "system":
            return _digest("\0".join(system)) if system else prompt_affinity(content)
        system.append(content)
    return _digest("\0".join(system))


def has_open_beginning(turns: Iterable[tuple[str, str]]) -> bool:
    """Return whether an affinity's text has a placeholder for another job's output, and is not known yet."""
    for number, (role, content) in enumerate(turns):
        if role == "system":
            if first_place(content) < len(content):
                return True
        else:
            return number == 0 and first_place(content) < min(PREFIX_CHARS, len(content))
    return False


def adapter_affinity(affinity: str | None, adapter: str | None) -> str | None:
    """Return the name for the same prefix under an adapter, which shares nothing with other adapters."""
    return affinity if affinity is None or adapter is None else _digest(f"{adapter}\0{affinity}")


@lru_cache(maxsize=1024)
def _digest(prefix: str) -> str:
    # Short, because it is stored with the id of every waiting job. Two prefixes of a lane rarely share one of
    # 238,328 names, in which case a job is merely preferred without benefit.
    number = int.from_bytes(hashlib.blake2b(prefix.encode(), digest_size=8).digest()) % len(_ALPHABET) ** 3
    rest, first = divmod(number, len(_ALPHABET))
    return _ALPHABET[first] + _ALPHABET[rest % len(_ALPHABET)] + _ALPHABET[rest // len(_ALPHABET)]
