"""The demo as a new user runs it, on few rows, with the real model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagemill.demo.demo_rows import LABELS, ROWS_FILE, job_fields, load_rows
from pagemill.demo.metrics import parse_metrics

LIMIT_S = 560.0


def start(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "pagemill.demo", *arguments], env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_it_labels_rows_and_says_how_it_went() -> None:
    demo = start("--rows", "12")
    output, errors = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 0, output + errors
    assert "12 of 12, 0 outside the choices" in output
    # The worker's status; its speed determines which of its stages are visible.
    assert re.search(r"starting Valkey and a worker for smollm2: [a-z]+", errors)
    assert "labeling: 12 of 12 rows" in errors
    agreeing = re.search(r"agree with people\s+(\d+) of 12", output)
    assert agreeing is not None
    assert int(agreeing[1]) >= 9
    used = re.search(r"KV blocks in use\s+peak (\d+)%, mean (\d+)% of 512", output)
    assert used is not None
    assert int(used[1]) >= int(used[2]) > 0
    hits = re.search(r"prefix-cache hits\s+(\d+)% of", output)
    assert hits is not None
    assert int(hits[1]) >= 50
    assert re.search(r"metrics\s+http://127\.0\.0\.1:\d+/metrics", output)


@pytest.mark.slow
def test_ctrl_c_stops_everything_it_started(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    demo = start("--state-dir", str(state_dir), "--keep")
    give_up = time.monotonic() + LIMIT_S
    while not (state_dir / "server.json").exists():
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.05)
    demo.send_signal(signal.SIGINT)
    _, errors = demo.communicate(timeout=LIMIT_S)
    assert demo.returncode == 130, errors
    assert "Traceback" not in errors
    assert not (state_dir / "server.json").exists()


def test_the_rows_are_balanced_and_carry_their_licence() -> None:
    rows = load_rows()
    assert len(rows) == len({row.id for row in rows}) == 200
    assert [sum(row.expected == label for row in rows) for label in LABELS] == [100, 100]
    assert "MIT License" in ROWS_FILE.with_name("demo_rows.LICENSE").read_text()


def test_jobs_share_everything_but_the_last_turn() -> None:
    first, second = (job_fields(row) for row in load_rows(2))
    assert first["messages"][:-1] == second["messages"][:-1]
    assert first["messages"][-1] != second["messages"][-1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("pagemill_x_total 3.0", {"pagemill_x_total": 3.0}),
        ("pagemill_x_total 3.0 1700000000", {"pagemill_x_total": 3.0}),
        ("# HELP pagemill_x_total Something 3.0", {}),
        ('pagemill_x{state="free"} 3.0', {}),
        ("", {}),
    ],
)
def test_metrics_page(line: str, expected: dict[str, float]) -> None:
    assert parse_metrics(line) == expected
