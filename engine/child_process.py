"""Processes of our own modules: how they find the package, and how they ended."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def environment() -> dict[str, str]:
    """Return an environment in which a child imports the same packages as this process."""
    root = str(Path(sys.modules["pagemill"].__path__[0]).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}


def ending(code: int) -> str:
    """Describe an exit status of `subprocess`, to follow the process's name."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
