"""A fingerprint names the function that an engine computes: `<digest>`, or `<digest>@<commit>` for a hub's model.

The digest covers config.json, samples of the weights and the settings that change numbers; the location of the files is
not part of it. Samples may miss a change of a few tensors, which a commit does not, so two commits differ even where
the digests agree. A folder has no commit, so a copy of a hub's files continues what the hub's began, and the
other way round.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

COMMIT_DIGITS = 12
_COMMIT = re.compile(r"[0-9a-f]{40}")


def shortened(revision: str) -> str:
    """Return a whole commit as fingerprints name it, and any other revision as it is."""
    return revision[:COMMIT_DIGITS] if _COMMIT.fullmatch(revision) else revision


def with_commit(digest: str, commit: str | None) -> str:
    """Return the fingerprint of files that may be a hub's commit."""
    return f"{digest}@{commit[:COMMIT_DIGITS]}" if commit else digest


@lru_cache(maxsize=1024)
def with_adapter(fingerprint: str, adapter_digest: str) -> str:
    """Return the fingerprint of a model with an adapter: without it, or with other weights, it is another function."""
    digest, separator, commit = fingerprint.partition("@")
    return hashlib.sha256(f"{digest} adapter {adapter_digest}".encode()).hexdigest()[:16] + separator + commit


def digest_of(fingerprint: str) -> str:
    """Return the part that does not depend on where the files came from."""
    return fingerprint.partition("@")[0]


def may_continue(stored: str, own: str) -> bool:
    """Return whether an engine with the fingerprint `own` may continue a checkpoint of `stored`."""
    if digest_of(stored) != digest_of(own):
        return False
    commits = {fingerprint.partition("@")[2] for fingerprint in (stored, own)} - {""}
    return len(commits) < 2


def revision_of(fingerprint: str) -> str:
    """Return the name of a model's revision: the hub's commit, shortened, or the digest where there is none."""
    digest, _, commit = fingerprint.partition("@")
    return commit or digest
