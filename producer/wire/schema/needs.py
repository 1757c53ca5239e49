"""Words for what a worker must know to run a job. They are the first part of its lane.

All workers know the envelope's one version and what release 0.1.0 had, so that needs no word. A later field of a job is
a word of its own, and a later feature may be one. Workers announce the words that they know, and pull from a lane only
if they know all of its words: a new word holds up nothing but the jobs that need it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

ENVELOPE_VERSION: Final = 1
BASE: Final = str(ENVELOPE_VERSION)
"""What every worker knows, and the first word of all lanes."""
AFTER: Final = "after"
"""The job waited for others. Such jobs have lanes of their own, where a worker finds those whose parents it ran."""
STORE: Final = "store"
"""The job is in a store."""
ABILITIES: Final = (
    "prompt", "chat", "tokens", "tools", "score", "pool", "labels", "ranked", "logprobs", "json", "structure",
    "sampling", "outlined", "images",
)  # fmt: skip
"""What a worker's engine may be unable to do. A job gets these words when such a worker releases it."""
LATER_FIELDS: Final[dict[str, str]] = {}
"""Fields of a job that 0.1.0 did not have, each with its release: `{"field": "0.2.0"}`. Each is a word, which a job
needs that sets it."""


def joined(*words: str) -> str:
    """Return the first part of a lane: `1`, or `1+after`."""
    return "+".join((BASE, *words))


def known_words(*, has_store: bool, lacks: Collection[str] = ()) -> str:
    """Return the words that workers of this release know, in the same form.

    Args:
        has_store: the worker has a store, so it knows that word.
        lacks: the abilities that its engine does not have.
    """
    abilities = (word for word in ABILITIES if word not in lacks)
    return joined(AFTER, *LATER_FIELDS, *([STORE] if has_store else ()), *abilities)
