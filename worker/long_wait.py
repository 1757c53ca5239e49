"""Logs the progress of a wait, so that a process never seems to hang."""

from __future__ import annotations

import logging
import time

from pagemill.common import report_interval


class LongWait:
    """Logs to `logger`: first after `FIRST_S`, then every two seconds on a terminal, or every 30 in a log."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._began = time.monotonic()
        self._due = self._began + report_interval.FIRST_S

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began

    def report(self, message: str, *args: object) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + report_interval.seconds()
            self._logger.info(message, *args)
