"""A benchmark at a small size, in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, run_python


def dry_run(module: str, out: Path, *words: str) -> tuple[Any, subprocess.CompletedProcess[str]]:
    """Run it; returns its report and its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    finished = run_python("-m", module, *words, "--out", out, cwd=ROOT, env=environment, timeout=580)
    assert finished.returncode == 0, finished.stderr
    return json.loads(out.read_text()), finished
