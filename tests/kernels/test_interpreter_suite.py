from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import triton

from tests.conftest import ROOT

_SUITE = Path(__file__).parent / "interpreter"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.mark.slow
@pytest.mark.skipif(
    _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4),
    reason="this Triton's interpreter cannot run loops with numpy 2.4 and newer (triton issue 9171)",
)
@pytest.mark.timeout(1800)
def test_kernels_in_the_interpreter() -> None:
    """Every test of interpreter/, in a separate process whose kernels run as numpy code."""
    run = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "",
            str(_SUITE),
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, f"\n{run.stdout}\n{run.stderr}"
    assert " passed" in run.stdout
