"""The tenant or id in a key's name, and the names that a text may contain."""

from __future__ import annotations

import re
from collections.abc import Iterator

PER_JOB = frozenset({
    "job", "in", "out", "ckpt", "md", "history", "followers", "children", "output", "settling", "end",
    "sharers"
})  # fmt: skip
PER_BATCH = frozenset({"batch", "bjobs", "bfeed", "backed", "bowner"})

_WORD = re.compile(rb"[A-Za-z0-9._@-]+")
_FILE_OF_JOB = re.compile(r"/j-([A-Za-z0-9._-]+)\.[0-9a-f]{12}$")


def tenant_of_lane(lane: str) -> str | None:
    parts = lane.split(":", 3)
    return parts[2] if len(parts) == 4 else None


def tenant_of_key(kind: str, rest: str) -> str | None:
    """Return the tenant in a key's name; None if it has none, or its position is unknown."""
    match kind:
        case "idem" | "twin":
            return rest.partition(":")[0]
        case "wait" | "alike":
            return tenant_of_lane(rest)
        case "files" | "abatches" | "chats" | "hooks" | "rate" | "spent" | "parked" | "over":
            return rest
        case "end" | "sharers" if rest.count(":") == 2:
            return rest.partition(":")[0]
    return None


def id_of_key(kind: str, rest: str) -> str | None:
    """Return the id of the job, batch or file that a key belongs to."""
    if kind in ("end", "sharers", "file"):
        return rest.rpartition(":")[0].rpartition(":")[2]
    if kind in PER_JOB | PER_BATCH | {"abatch"}:
        return rest
    return None


def job_of_file(uri: str) -> str | None:
    """Return the job of a file of the store."""
    found = _FILE_OF_JOB.search(uri)
    return found[1] if found else None


def candidate_names(text: bytes) -> Iterator[str]:
    """Yield possible names and ids; a dot or dash at the end may belong to the sentence."""
    for found in _WORD.findall(text):
        word = found.decode()
        yield word
        if word[-1] in ".-":
            yield word.rstrip(".-")
        if "@" in word:
            yield from word.split("@")
