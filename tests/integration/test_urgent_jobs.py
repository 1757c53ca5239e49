"""A job of high priority at a worker whose batch slots are all occupied by jobs of low priority."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagemill.worker.worker import Worker
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow

ROWS = 4
LONG = "0123456789" * 40
SHORT = "somebody waits"


@pytest.fixture(params=[0.0, 0.01], ids=["recomputed", "host tier"])
def worker(request: pytest.FixtureRequest, client: QueueClient) -> Iterator[Worker]:
    config = worker_config(
        client.url, client.queue, model="echo:10", max_num_seqs=ROWS, host_cache_gib=request.param
    )
    with running_worker(config) as worker:
        yield worker


def fill(client: QueueClient, priority: str = "low") -> list[str]:
    """Jobs of four seconds each, twice as many as batch slots; half of them run when this returns."""
    job: dict[str, Any] = {"model": "echo", "prompt": LONG, "max_tokens": len(LONG), "priority": priority}
    ids = client.submit(*(job for _ in range(2 * ROWS)))
    eventually(
        lambda: sum(client.status(job_id).state == "running" for job_id in ids) == ROWS,
        "the rows to be taken",
    )
    return ids


def displaced(worker: Worker) -> int:
    stats = worker.engine.stats
    assert stats is not None
    return stats.scheduler.displaced


def test_it_takes_a_row_and_whoever_had_it_ends_as_if_nothing_had_been(
    client: QueueClient, worker: Worker
) -> None:
    low = fill(client)
    urgent = client.submit(
        *({"model": "echo", "prompt": SHORT, "max_tokens": 20, "priority": "high"} for _ in range(2))
    )
    for outcome in client.wait(urgent):
        result = outcome.value()
        assert result is not None
        assert result.text == SHORT
    assert not any(client.status(job_id).done for job_id in low), "a row had become free by itself"
    eventually(lambda: displaced(worker) == 2, "the engine's figures")
    for outcome in client.wait(low):
        result = outcome.value()
        assert result is not None
        assert (result.text, result.finish_reason) == (LONG, "length")
        assert outcome.result is not None
        assert outcome.result.attempt == 1
    eventually(lambda: worker.counters.job_seconds.read()["displaced"] > 0.1, "the time of those displaced")


def test_free_blocks_are_its_own_whatever_the_low_jobs_have_computed(
    client: QueueClient, worker: Worker
) -> None:
    job = {"model": "echo", "prompt": "low", "max_tokens": 400, "priority": "low"}
    low = client.submit(*(job | {"min_tokens": 400} for _ in range(ROWS)))
    eventually(lambda: all(client.status(one).state == "running" for one in low), "the rows to be taken")
    (urgent,) = client.submit({"model": "echo", "prompt": SHORT, "max_tokens": 3000, "priority": "high"})
    client.wait([urgent])
    assert not any(client.status(job_id).done for job_id in low)
    client.wait(low)


@pytest.mark.parametrize("held", ["normal", "low"])
def test_only_high_takes_and_only_low_gives(client: QueueClient, worker: Worker, held: str) -> None:
    ids = fill(client, held)
    (waiting,) = client.submit(
        {
            "model": "echo",
            "prompt": SHORT,
            "max_tokens": 20,
            "priority": "high" if held == "normal" else "normal",
        }
    )
    client.wait(ids[:1])
    assert displaced(worker) == 0
    client.wait([waiting])
    assert displaced(worker) == 0
    client.wait(ids)
