"""Child processes of Pagemill modules: import path, memory limits and exit status."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def environment() -> dict[str, str]:
    """Return an environment in which a child imports the same packages as this process."""
    root = str(Path(sys.modules["pagemill"].__path__[0]).parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}


def memory() -> tuple[int, int]:
    """Return the mapped and the resident memory of this process in bytes; zeros if unknown."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0, 0
    import resource  # not on Windows, and only children need it

    mapped, resident, *_ = (int(pages) * resource.getpagesize() for pages in statm.read_text().split())
    return mapped, resident


def limit_memory(more_bytes: int, *, is_final: bool = False) -> None:
    """Limit the memory of this process to `more_bytes` above its present size. macOS does not have such a limit.

    Args:
        is_final: the process cannot raise the limit again.
    """
    if mapped := memory()[0]:
        import resource

        limit = mapped + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit if is_final else resource.RLIM_INFINITY))


def ending(code: int) -> str:
    """Describe an exit status of `subprocess`, as text that follows the process's name."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
