"""Commands for child processes that must not outlive the process that starts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs between fork and exec: requests SIGTERM from the kernel for when the thread that started the child
# exits, and exits immediately if it already has.
_ASK = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def dependent(command: Sequence[str]) -> list[str]:
    """Return a command line that runs `command`, which gets SIGTERM once the starting thread has ended.

    Start it on a thread that lives as long as the child should. Linux only: elsewhere the child keeps running.
    """
    return [sys.executable, "-I", "-S", "-c", _ASK, str(os.getpid()), *command]
