"""The server's clock as computed by a worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagemill.worker import job_queue


def test_a_step_of_the_local_clock_does_not_move_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = 5000.0
    monkeypatch.setattr(job_queue, "time", SimpleNamespace(time=lambda: wall, monotonic=lambda: 10.0))
    clock = job_queue.ServerClock()
    assert clock.now() == 5000.0, "until it is set, the local one"
    assert clock.set(5001.0) == 1.0
    wall += 3600
    assert clock.now() == 5001.0
    assert clock.set(5001.0) == -3599.0
