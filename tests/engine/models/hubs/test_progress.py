"""The progress display of a download."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from pagemill.engine.models.hubs import progress
from pagemill.engine.models.hubs.progress import bytes_under, logged_download, size
from tests.worker.harness import eventually


def test_a_log_gets_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(progress, "LINES_S", 0.01)
    said: list[str] = []
    with logged_download("org/name", tmp_path, 3000, said.append, has_bar=True):
        (tmp_path / "a").write_bytes(b"x" * 1500)
        eventually(lambda: any("org/name: 1.5 kB of 3.0 kB, " in line for line in said), "a line")
    assert said[0] == f"downloading 3.0 kB of org/name into {tmp_path}"
    assert said[-1].startswith("downloaded org/name: 3.0 kB in ")


def test_a_download_that_fails_does_not_claim_to_be_done(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        pytest.raises(KeyboardInterrupt),
        logged_download("org/name", tmp_path, 3000, said.append, has_bar=True),
    ):
        raise KeyboardInterrupt
    assert len(said) == 1


def test_on_a_terminal_the_librarys_bar_replaces_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    said: list[str] = []
    with logged_download("org/name", tmp_path, 3000, said.append, has_bar=True):
        time.sleep(0.1)
    assert [line.partition(" ")[0] for line in said] == ["downloading", "downloaded"]


def test_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"x" * 100)
    (tmp_path / "snapshot").symlink_to(tmp_path / "blob")
    assert bytes_under(tmp_path) == 100


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3_400_000_000, "3.4 GB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
