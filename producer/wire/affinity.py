"""Which jobs share a prefix: a worker that pulls them together computes the prefix once."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from producer.wire.protocol import Job

PREFIX_CHARS = 256
"""Of a prompt without a system message: its beginning stands for the template it was made with."""
PREFIX_TOKENS = 64


def prefix_hash(job: Job) -> str | None:
    """16 hex digits, equal for jobs that begin alike; None for a job that is too short to share much."""
    prefix = _prefix(job)
    return None if prefix is None else hashlib.blake2b(prefix.encode(), digest_size=8).hexdigest()


def _prefix(job: Job) -> str | None:
    if job.prompt is not None:
        return _beginning(job.prompt)
    if job.prompt_token_ids is not None:
        first = job.prompt_token_ids[:PREFIX_TOKENS]
        return ",".join(map(str, first)) if len(job.prompt_token_ids) > PREFIX_TOKENS else None
    messages = job.messages or ()
    system: list[str] = []
    for message in messages:
        if message.role != "system":
            break
        system.append(message.content)
    return "\0".join(system) if system else _beginning(messages[0].content)


def _beginning(text: str) -> str | None:
    return text[:PREFIX_CHARS] if len(text) > PREFIX_CHARS else None
