"""systemd's notification protocol, sd_notify(3): datagrams to the socket that NOTIFY_SOCKET names."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger(__name__)

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""For this process, not for its children."""


class ServiceManager:
    """Reports this process's state to systemd. Does nothing without a listening manager."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(environment) if self._address else None
        """The manager's watchdog timeout; None: disabled."""
        self._last_beat = float("-inf")
        self._last_status = ""

    def notify(self, **fields: str | int) -> None:
        """Send the fields: READY=1, STOPPING=1, STATUS=text. A manager that no longer exists is logged."""
        if not self._address:
            return
        message = "\n".join(f"{name}={value}" for name, value in fields.items())
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(1.0)
                sender.connect(path)
                sender.sendall(message.encode())
        except OSError as error:
            logger.debug("the service manager at %s can't be notified: %s", self._address, error)

    def notify_status(self, status: str) -> None:
        """Send a status line if it differs from the last one."""
        if status != self._last_status:
            self._last_status = status
            self.notify(STATUS=status)

    def beat(self, now: float) -> None:
        """Send watchdog notifications twice as often as required. `now`: monotonic seconds."""
        if self.watchdog_s is not None and now >= self._last_beat + self.watchdog_s / 2:
            self._last_beat = now
            self.notify(WATCHDOG=1)


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    try:
        seconds = int(environment.get("WATCHDOG_USEC", "")) / 1e6
        pid = int(environment.get("WATCHDOG_PID") or os.getpid())
    except ValueError:
        return None
    return seconds if seconds > 0 and pid == os.getpid() else None
