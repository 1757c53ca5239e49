"""Words for the knowledge that a worker needs to run a job. They are the first part of its lane.

All workers know the envelope's only version and the features of release 0.1.0, which need no word. Each later
field of a job is a word, and later features may be words. Workers announce the words that they know, and pull
from a lane only if they know all of its words: a new word only delays the jobs that need it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

ENVELOPE_VERSION: Final = 1
BASE: Final = str(ENVELOPE_VERSION)
"""The knowledge of every worker, and the first word of all lanes."""
AFTER: Final = "after"
"""The job waited for others. Such jobs have separate lanes, where a worker finds those whose parents it ran."""
STORE: Final = "store"
"""The job is in a store."""
ABILITIES: Final = (
    "prompt", "chat", "tokens", "tools", "score", "pool", "labels", "ranked", "logprobs", "json", "structure",
    "sampling", "outlined", "images",
)  # fmt: skip
"""Abilities that a worker's engine may lack. A job gets these words when such a worker releases it."""
LATER_FIELDS: Final[dict[str, str]] = {}
"""Fields of a job that 0.1.0 did not have, each with its release: `{"field": "0.2.0"}`. Each is a word that a
job needs if it sets the field."""


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
