"""Shows a download: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LOOK_S = 0.5
FIRST_LINE_S = 2.0
LINES_S = 10.0

Say = Callable[[str], None]


class DownloadProgress:
    """Watches a hub's folder grow while others write into it; its own thread, for the length of a `with`.

    The folder is looked at, and not the libraries' callbacks, which differ between hubs, their versions and
    transports (HTTP, Xet).
    """

    def __init__(self, what: str, folder: Path, missing_bytes: int, say: Say, *, draws: bool = True) -> None:
        """`missing_bytes` are to arrive in `folder`; `say` takes lines. `draws`: a bar too, on a terminal."""
        self._what, self._folder, self._total, self._say = what, folder, missing_bytes, say
        self._draws = draws and sys.stderr.isatty()
        self._before = bytes_under(folder)
        self._began = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagemill-download", daemon=True)

    def __enter__(self) -> Self:
        self._say(f"downloading {size(self._total)} of {self._what} into {self._folder}")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if error is None:
            seconds = max(time.monotonic() - self._began, 1e-3)
            self._say(f"downloaded {self._what}: {size(self._total)} in {seconds:.1f} s")

    def _run(self) -> None:
        self._draw() if self._draws else self._tell()

    def _draw(self) -> None:
        from tqdm import tqdm

        bar: Any = tqdm(total=self._total, desc=self._what, unit="B", unit_scale=True, leave=False)
        with bar:
            while not self._is_over.wait(LOOK_S):
                bar.n = self._arrived()
                bar.refresh()

    def _tell(self) -> None:
        pause = FIRST_LINE_S
        while not self._is_over.wait(pause):
            pause = LINES_S
            arrived, seconds = self._arrived(), time.monotonic() - self._began
            self._say(
                f"{self._what}: {size(arrived)} of {size(self._total)}, {size(int(arrived / seconds))}/s"
            )

    def _arrived(self) -> int:
        return min(self._total, max(0, bytes_under(self._folder) - self._before))


def bytes_under(folder: Path) -> int:
    """Return the bytes of all files in a folder; links are not followed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:  # renamed meanwhile
                continue
            total += status.st_size if not os.path.islink(os.path.join(place, name)) else 0
    return total


def size(count: int) -> str:
    """Format a number of bytes: 3.4 GB."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
