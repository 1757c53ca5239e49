"""The signals that ask a process to drain."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT and SIGHUP: closing a terminal must not cost a job its place.

    SIGHUP is left out if it is ignored at the start, as under `nohup`. Windows has none.
    """
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is None or signal.getsignal(hangup) is signal.SIG_IGN:
        return (signal.SIGTERM, signal.SIGINT)
    return (signal.SIGTERM, signal.SIGINT, hangup)
