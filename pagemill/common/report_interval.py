"""The interval of progress reports during long waits: short for a terminal, long for a log."""

from __future__ import annotations

import sys

FIRST_S = 2.0
"""The wait before the first report."""
TERMINAL_S = 2.0
LOG_S = 30.0


def seconds() -> float:
    """Return the time between two reports on standard error."""
    return TERMINAL_S if sys.stderr is not None and sys.stderr.isatty() else LOG_S
