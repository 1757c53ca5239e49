from __future__ import annotations

import pytest

from benchmarks.kv import windows
from benchmarks.kv.windows import Model, documents, run

TINY = Model("tiny", (None, 64, 64, 64) * 2, 2, 8, 512)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "OUTPUT_TOKENS", 16)
    monkeypatch.setattr(windows, "CHUNK", 64)


def test_one_group_keeps_what_windows_never_read_again() -> None:
    whole = [(TINY.context - 16, 16)]
    one, grouped = (run(TINY, whole, is_grouped=is_grouped) for is_grouped in (False, True))
    assert (one.groups, grouped.groups) == (1, 4)
    assert one.unread_at_end == pytest.approx(3 / 4 * (1 - 64 / 512), abs=0.01)
    assert grouped.unread_at_end < 0.1  # parts of blocks
    # Everything in one group of four, window and a chunk in the others.
    assert 0.25 < grouped.largest_gib / one.largest_gib < 0.25 + 0.75 * (64 + 64 + 3 * 16) / 512
    assert grouped.steps == one.steps


def test_more_documents_run_in_the_same_memory() -> None:
    drawn = documents(TINY, 12, 0)
    assert all(prompt + 16 <= TINY.context for prompt, _ in drawn)
    pool_bytes = 2 * TINY.context // 16 * TINY.shape(is_grouped=False).block_bytes
    one, grouped = (
        run(TINY, drawn, is_grouped=is_grouped, pool_bytes=pool_bytes) for is_grouped in (False, True)
    )
    assert grouped.rows > one.rows
    assert grouped.steps < one.steps
