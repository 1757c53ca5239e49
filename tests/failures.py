"""A plugin: write each failure to a file, for `tests.run` to try again.

One JSON object per line: the test's id and its traceback. The file's path is in PAGEMILL_TEST_FAILURES. The
last line states that the run was completed: a test can end the process, with any exit code.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _record(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _record(report)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _write({"ended": int(exitstatus)})


def _record(report: Any) -> None:
    if report.failed:
        _write({"test": report.nodeid, "traceback": report.longreprtext})


def _write(entry: dict[str, Any]) -> None:
    path = os.environ.get("PAGEMILL_TEST_FAILURES")
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    with Path(path).open("a") as file:
        file.write(json.dumps(entry) + "\n")
