"""Machine code for a CPU that may differ from this one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from tests.conftest import run_python

_PRINT = """
import json
code = "".join(run.inspect_asm().values())
print(json.dumps([line.split() for line in code.splitlines() if line.strip()]))
"""


def environment_of(cpu: str, features: Iterable[str]) -> dict[str, str]:
    """Return the environment of a process whose kernels are compiled for that CPU."""
    chosen = ",".join(f"+{feature}" for feature in features)
    return os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": chosen}


def instructions(code: str, cpu: str, features: Iterable[str], cache: Path) -> list[list[str]]:
    """Return the compiled lines, split into words, of the function `run`, which `code` defines."""
    done = run_python(
        "-c", code + _PRINT, env=environment_of(cpu, features) | {"NUMBA_CACHE_DIR": str(cache)}, check=True
    )
    lines: list[list[str]] = json.loads(done.stdout)
    return lines
