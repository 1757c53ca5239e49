"""What a download shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
from pathlib import Path

import pytest

from pagemill.engine.models.hubs import progress
from pagemill.engine.models.hubs.progress import DownloadProgress, bytes_under, size
from tests.worker.harness import eventually


class Terminal:
    """A terminal of 80 columns in place of stderr."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self._ours, False)
        self.stream = os.fdopen(theirs, "w", buffering=1)
        self._seen = b""

    def seen(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            self._seen += os.read(self._ours, 65536)
        return self._seen

    def close(self) -> None:
        self.stream.close()
        os.close(self._ours)


def test_a_terminal_sees_a_bar_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOOK_S", 0.01)
    terminal = Terminal()
    (tmp_path / "older").write_bytes(b"x" * 999)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("sys.stderr", terminal.stream)
            with DownloadProgress("org/name", tmp_path, 300_000, lambda _: None):
                eventually(lambda: b"org/name:   0%" in terminal.seen(), "an empty bar")
                (tmp_path / "part.incomplete").write_bytes(b"x" * 150_000)
                eventually(lambda: b"150k/300k" in terminal.seen(), "half a bar")
    finally:
        terminal.close()


def test_a_log_gets_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(progress, "LINES_S", 0.01)
    said: list[str] = []
    with DownloadProgress("org/name", tmp_path, 3000, said.append):
        (tmp_path / "a").write_bytes(b"x" * 1500)
        eventually(lambda: any("org/name: 1.5 kB of 3.0 kB, " in line for line in said), "a line")
    assert said[0] == f"downloading 3.0 kB of org/name into {tmp_path}"
    assert said[-1].startswith("downloaded org/name: 3.0 kB in ")


def test_a_download_that_fails_does_not_claim_to_be_done(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt), DownloadProgress("org/name", tmp_path, 3000, said.append):
        raise KeyboardInterrupt
    assert len(said) == 1


def test_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"x" * 100)
    (tmp_path / "snapshot").symlink_to(tmp_path / "blob")
    assert bytes_under(tmp_path) == 100


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3_400_000_000, "3.4 GB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text
