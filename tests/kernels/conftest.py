"""A kernel's definition binds Triton to its interpreter or its compiler, so one process cannot use both.

`interpreter/` is collected only under TRITON_INTERPRET=1, everything else only without it. Plain `pytest`
covers both, because test_interpreter_suite.py runs the other process.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    if _INTERPRETED:
        # Triton 3.6's interpreter causes it when it reads the bounds of a loop.
        config.addinivalue_line(
            "filterwarnings", "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
        )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path == _HERE / "interpreter":
        return None if _INTERPRETED else True
    if collection_path == _HERE / "aot" or collection_path.name == "test_interpreter_suite.py":
        return True if _INTERPRETED else None
    return None
