"""A few tens of the kills of sweep.py, over each kind of server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversarial.kills.sweep import sweep
from tests.topologies import KINDS, any_server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kills"),
    [("one server", 4), *((kind, 15) for kind in KINDS)],
)
def test_nothing_is_lost_however_many_workers_die(kind: str, kills: int, tmp_path: Path) -> None:
    with any_server(kind, tmp_path / "server") as url:
        toll = sweep(url, kind, kills, seed=kills, directory=tmp_path / "workers", has_poison=kills > 10)
    assert toll.is_clean, toll
    assert toll.jobs >= 60
