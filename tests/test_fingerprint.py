"""The checkpoints that an engine may resume."""

from __future__ import annotations

import pytest

from pagemill.common.fingerprint import digest_of, may_continue, with_commit

DIGEST = "0123456789abcdef"
FIRST, SECOND = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    ("stored", "own", "may"),
    [
        (None, None, True),  # a folder's, unchanged
        (None, FIRST, True),  # a copy of a hub's files, and the hub's files
        (FIRST, None, True),
        (FIRST, FIRST, True),
        (FIRST, SECOND, False),  # the digest samples weights, and may miss changes of a commit
    ],
)
def test_equal_digests(stored: str | None, own: str | None, may: bool) -> None:
    assert may_continue(with_commit(DIGEST, stored), with_commit(DIGEST, own)) is may


def test_another_digest_never_continues() -> None:
    other = "f" * 16
    for commit in (None, FIRST):
        assert not may_continue(with_commit(DIGEST, commit), with_commit(other, commit))
    assert not may_continue("", with_commit(DIGEST, FIRST))


def test_a_folders_fingerprint_is_its_digest() -> None:
    assert with_commit(DIGEST, None) == DIGEST
    assert with_commit(DIGEST, FIRST) == f"{DIGEST}@{'a' * 12}"
    assert digest_of(with_commit(DIGEST, FIRST)) == DIGEST
