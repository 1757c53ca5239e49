"""News of a wait that goes on: a line every two seconds, so that a process never looks as if it hung."""

from __future__ import annotations

import logging
import time

EVERY_S = 2.0


class LongWait:
    """Logs to `logger` at most every `EVERY_S`; the first time after that long."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._began = self._told_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def tell(self, message: str, *args: object) -> None:
        if time.monotonic() - self._told_at >= EVERY_S:
            self._told_at = time.monotonic()
            self._logger.info(message, *args)
