"""Lines on the progress of a download."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FIRST_LINE_S = 2.0
LINES_S = 10.0

Say = Callable[[str], None]


@contextmanager
def logged_download(what: str, folder: Path, total: int, say: Say, *, has_bar: bool) -> Iterator[None]:
    """Report start, progress and completion of a download of `total` bytes into `folder`.

    Progress is measured by the folder's size, not by the libraries' callbacks, which differ between hubs, their
    versions and transports (HTTP, Xet).

    Args:
        has_bar: the library draws progress bars on a terminal, where progress lines are then omitted.
    """
    before, start, finished = bytes_under(folder), time.monotonic(), threading.Event()

    def report() -> None:
        pause = FIRST_LINE_S
        while not finished.wait(pause):
            pause = LINES_S
            arrived = min(total, max(0, bytes_under(folder) - before))
            rate = int(arrived / (time.monotonic() - start))
            say(f"{what}: {size(arrived)} of {size(total)}, {size(rate)}/s")

    say(f"downloading {size(total)} of {what} into {folder}")
    thread = threading.Thread(target=report, name="pagemill-download", daemon=True)
    if not (has_bar and sys.stderr.isatty()):
        thread.start()
    try:
        yield
    finally:
        finished.set()
        if thread.ident is not None:
            thread.join()
    say(f"downloaded {what}: {size(total)} in {max(time.monotonic() - start, 1e-3):.1f} s")


def bytes_under(folder: Path) -> int:
    """Return the bytes of all files in a folder; links are not followed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:  # renamed meanwhile
                continue
            total += 0 if stat.S_ISLNK(status.st_mode) else status.st_size
    return total


def size(count: int) -> str:
    """Format a number of bytes: 3.4 GB."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
