"""The simulation in small: real scripts, two client processes, and every job with one result."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.queues import simulation
from benchmarks.queues.resp import Replies, ServerError, pack
from benchmarks.queues.server import start_server
from benchmarks.queues.simulated_workers import Load

STAGE = {
    "scripts_per_s": 0.0, "server_us_per_script": 0.0, "client_cores": 0.0, "memory_mb": 0.0,
    "lost_leases": 0, "latency_ms": {},
}  # fmt: skip


def stage(workers: int, jobs_per_s: float, server_cores: float) -> simulation.Stage:
    return simulation.Stage(
        workers=workers, offered_jobs_per_s=8.0 * workers, jobs_per_s=jobs_per_s,
        server_cores=server_cores, **STAGE,
    )  # fmt: skip


@pytest.mark.slow
def test_simulated_workers_do_real_jobs_once_each(tmp_path: Path) -> None:
    load = Load(rows=4, service_s=0.2, tokens=16, step_s=0.01, tenants=3, checkpoint_s=0.05)
    with start_server("valkey", tmp_path) as url:
        figures = simulation.measure(url, load, jobs=600, workers=[6, 2], processes=2, stage_s=0.4)
    assert simulation.is_sound(figures), (figures.ended, figures.ends_told)
    assert [stage.workers for stage in figures.stages] == [2, 6]
    assert figures.drain is not None
    # A short stage may pass without a commit where the machine is slow; what is left is done at the end.
    assert figures.drain.jobs_per_s > 0
    assert figures.drain.scripts_per_s > figures.drain.jobs_per_s
    assert figures.drain.server_cores > 0
    assert all(trip["p50"] <= trip["p99"] for trip in figures.drain.latency_ms.values())
    assert {"pull", "checkpoint", "commit"} <= figures.drain.latency_ms.keys()
    assert figures.bytes_per_waiting_job > load.prompt_bytes
    rates, trips = simulation.tables(figures)
    assert rates.row_count == trips.row_count == 3
    simulation.find_limit(figures.stages)


def test_the_limit_is_where_more_workers_bring_nothing() -> None:
    grown = [stage(10, 80, 0.1), stage(100, 790, 0.6), stage(1000, 1200, 0.95)]
    limit = simulation.find_limit(grown)
    assert (limit.workers, limit.reached_by) == (pytest.approx(150), "server")
    assert "stops growing at 150 workers" in simulation.verdict(limit)
    starved = [*grown[:2], stage(1000, 1000, 0.5)]
    assert simulation.find_limit(starved).reached_by == "machine"
    early = simulation.find_limit(grown[:2])
    assert early.workers is None
    assert early.jobs_per_s_of_a_full_core == pytest.approx(790 / 0.6)
    assert "still grew" in simulation.verdict(early)


def test_a_run_that_lost_or_doubled_a_result_is_not_sound() -> None:
    good = simulation.Figures(jobs=2, ended={"succeeded": 2}, ends_told=2)
    assert simulation.is_sound(good)
    assert not simulation.is_sound(simulation.Figures(jobs=2, ended={"succeeded": 2}, ends_told=3))
    assert not simulation.is_sound(
        simulation.Figures(jobs=2, ended={"succeeded": 1, "running": 1}, ends_told=1)
    )


def test_replies_are_read_whatever_the_pieces_they_come_in() -> None:
    assert pack(("GET", b"\xff", 12)) == b"*3\r\n$3\r\nGET\r\n$1\r\n\xff\r\n$2\r\n12\r\n"
    data = b"*3\r\n:1\r\n$2\r\nab\r\n*1\r\n$-1\r\n$4\r\n\r\n\r\n\r\n+OK\r\n*0\r\n"
    expected = [[1, b"ab", [None]], b"\r\n\r\n", b"OK", []]
    for size in range(1, len(data) + 1):
        replies = Replies(4)
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        complete = [replies.feed(piece) for piece in pieces]
        assert complete == [False] * (len(pieces) - 1) + [True]
        assert replies.values == expected
    with pytest.raises(ServerError, match="NOSCRIPT"):
        Replies(1).feed(b"-NOSCRIPT no such script\r\n")
