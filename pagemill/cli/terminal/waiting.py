"""Progress of a wait, on stderr: a spinner on a terminal, or a line at each change and every 30 seconds."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from pagemill.common import report_interval


class Waiting:
    """A long wait. `tell` can be called often: an unchanged state is printed once per `LOG_S`.

    `is_short`: the wait is mostly over soon. It is printed only if it takes longer than `FIRST_S`.
    """

    def __init__(self, what: str, console: Console | None = None, *, is_short: bool = False) -> None:
        self._what = what
        self._is_short = is_short
        self._console = console or Console(stderr=True)
        self._status: Status | None = None
        self._state = ""
        self._began = time.monotonic()
        self._due = self._began + report_interval.FIRST_S

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._due = self._began + report_interval.FIRST_S
        if self._console.is_terminal:
            self._status = self._console.status(self._line())
            self._status.start()
        elif not self._is_short:
            self._print()
        return self

    def report(self, state: str = "") -> None:
        """Print the progress if it has changed, or if the last line was printed a while ago."""
        is_news, self._state = state not in ("", self._state), state or self._state
        if self._status is not None:
            self._status.update(self._line())
        elif (is_news and not self._is_short) or time.monotonic() >= self._due:
            self._print()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def _print(self) -> None:
        self._due = time.monotonic() + report_interval.LOG_S
        self._console.print(self._line(), markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        seconds = time.monotonic() - self._began
        state = f": {self._state}" if self._state else ""
        return f"{self._what}{state}" + (f" ({seconds:.0f} s)" if seconds >= 1 else "")
