"""The machine and the versions of a measurement, without which results are meaningless."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

# One busy process on one of two cores already doubles the time of an operator that uses both.
BUSY_LOAD = 0.5


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def is_busy() -> bool:
    return os.getloadavg()[0] > BUSY_LOAD


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
