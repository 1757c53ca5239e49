"""A queue in a storm of random calls, with a clock that jumps; all guarantees of docs/protocol.md must hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.adversarial.queue.storm import Storm
from tests.producer.driving import Queue, open_queue
from tests.server_clock import ClockedServer, clocked_server
from tests.topologies import KINDS, any_server

ALL_WRITTEN = ("--appendfsync", "always")
"""With `everysec` a server that is killed while its disk is busy loses data of its latest replies."""
LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]


@contextmanager
def opened(url: str, name: str) -> Iterator[Queue]:
    queue = open_queue(url, name)
    try:
        yield queue
    finally:
        queue.transport.close()


def run_storm(
    queue: Queue, seed: int, jobs: int, clock: ClockedServer | None = None, *, kills: bool = False
) -> None:
    """Prints its parameters when it fails. With a stopped clock they reproduce the storm; otherwise, and with
    killed servers, they reproduce only the choice of calls."""
    storm = Storm(queue, seed, clock, kills=kills)
    try:
        storm.run(jobs)
    except AssertionError as error:
        error.add_note(f"seed {seed}, after {storm.meter.calls} calls and {storm.kills_done} kills")
        error.add_note(storm.meter.report())
        raise
    assert storm.kills_done > 0 or not kills


@pytest.mark.slow
@pytest.mark.parametrize("binary", ["valkey-server", "redis-server"])
@pytest.mark.parametrize(
    ("seed", "jobs"), [(1, 800), *(pytest.param(seed, 15_000, marks=LONG) for seed in (2, 3))]
)
def test_while_its_clock_jumps(binary: str, seed: int, jobs: int, tmp_path: Path, queue_name: str) -> None:
    with clocked_server(tmp_path, binary) as clock, opened(clock.url, queue_name) as queue:
        run_storm(queue, seed, jobs, clock)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("binary", ["valkey-server", "redis-server"])
@pytest.mark.parametrize("seed", [4, 5])
def test_while_its_server_is_killed(binary: str, seed: int, tmp_path: Path, queue_name: str) -> None:
    """In addition, its clock jumps; some calls are in flight when it crashes."""
    with clocked_server(tmp_path, binary, ALL_WRITTEN) as clock, opened(clock.url, queue_name) as queue:
        run_storm(queue, seed, 8_000, clock, kills=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_on_servers_in_company(kind: str, tmp_path: Path, queue_name: str) -> None:
    """These servers use the machine's clock: leases and pauses are short, and time has to pass."""
    with any_server(kind, tmp_path / "server") as url, opened(url, queue_name) as queue:
        run_storm(queue, 6, 5_000)
