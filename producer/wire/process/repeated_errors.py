"""Prevents a loop that repeatedly fails with the same error from flooding the log."""

from __future__ import annotations

import logging
import re
import threading
import time
import traceback
from collections import OrderedDict
from dataclasses import dataclass

EVERY_S = 60.0
MAX_KINDS = 64
"""Maximum number of remembered kinds of errors; beyond it the least recently seen is dropped."""

Kind = tuple[str, str, str, str]
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(slots=True)
class _Seen:
    told_at: float
    """Monotonic seconds."""
    count: int = 0
    """Records suppressed since then."""


class RepeatedErrors(logging.Filter):
    """A loop's log filter: logs an error once with its traceback, then up to once per minute with a count.

    Applies to records with a traceback, and to those logged with `extra=IN_LOOP`. Records are the same if
    message, error and the error's location are, ignoring numbers in them. Thread-safe.
    """

    def __init__(self, every_s: float = EVERY_S) -> None:
        super().__init__()
        self._every_s = every_s
        self._lock = threading.Lock()
        self._seen: OrderedDict[Kind, _Seen] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record; appends the count to one that was suppressed before."""
        is_in_loop = record.__dict__.pop("in_loop", False)  # meant for this filter, not for formatters
        if not (record.exc_info or is_in_loop):
            return True
        now = time.monotonic()
        with self._lock:
            kind = _kind(record)
            seen = self._seen.get(kind)
            if seen is None:
                self._seen[kind] = _Seen(now)
                if len(self._seen) > MAX_KINDS:
                    self._seen.popitem(last=False)
                return True
            self._seen.move_to_end(kind)
            seen.count += 1
            if now - seen.told_at < self._every_s:
                return False
            self._append_count(record, seen.count, now - seen.told_at)
            seen.told_at, seen.count = now, 0
        return True

    def _append_count(self, record: logging.LogRecord, count: int, seconds: float) -> None:
        error = record.exc_info[1] if record.exc_info else None
        what = record.getMessage() + (f": {error}" if error is not None else "")
        record.msg, record.args = "%s (%d times more in %.0f s)", (what, count, seconds)
        record.exc_info, record.exc_text = None, None


IN_LOOP = {"in_loop": True}
"""`extra` for a record without a traceback that a loop may repeat."""


def _kind(record: logging.LogRecord) -> Kind:
    error = record.exc_info[1] if record.exc_info else None
    message = _NUMBER.sub("#", record.getMessage())
    if error is None:
        return message, "", "", ""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return message, type(error).__name__, place, _NUMBER.sub("#", str(error))
