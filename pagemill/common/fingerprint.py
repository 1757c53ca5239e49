"""A fingerprint identifies an engine's function: `<digest>`, or `<digest>@<commit>` for a hub's model.

The digest covers config.json, samples of the weights and the settings that change results; it does not include the
location of the files. Samples may miss a change of a few tensors, but a commit does not, so two commits differ even if
the digests agree. A folder does not have a commit, so a copy of a hub's files can continue work of the original, and
vice versa.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

COMMIT_DIGITS = 12
_COMMIT = re.compile(r"[0-9a-f]{40}")


def shortened(revision: str) -> str:
    """Return a full commit in the form of fingerprints, and any other revision unchanged."""
    return revision[:COMMIT_DIGITS] if _COMMIT.fullmatch(revision) else revision


def with_commit(digest: str, commit: str | None) -> str:
    """Return the fingerprint of files that may be a hub's commit."""
    return f"{digest}@{commit[:COMMIT_DIGITS]}" if commit else digest


@lru_cache(maxsize=1024)
def with_adapter(fingerprint: str, adapter_digest: str) -> str:
    """Return the fingerprint of a model with an adapter, which differs without it or with other weights."""
    digest, separator, commit = fingerprint.partition("@")
    return hashlib.sha256(f"{digest} adapter {adapter_digest}".encode()).hexdigest()[:16] + separator + commit


def digest_of(fingerprint: str) -> str:
    """Return the part that does not depend on the files' origin."""
    return fingerprint.partition("@")[0]


def may_continue(stored: str, own: str) -> bool:
    """Return whether an engine with the fingerprint `own` may continue a checkpoint of `stored`."""
    if digest_of(stored) != digest_of(own):
        return False
    commits = {fingerprint.partition("@")[2] for fingerprint in (stored, own)} - {""}
    return len(commits) < 2


def revision_of(fingerprint: str) -> str:
    """Return the name of a model's revision: the hub's commit, shortened, or the digest without one."""
    digest, _, commit = fingerprint.partition("@")
    return commit or digest
