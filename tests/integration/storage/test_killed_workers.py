"""Files after workers were killed: a committed result exists, and no other file remains."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from pagemill.monitoring.counters import WorkerCounters
from pagemill.producer.wire.calls import stored, transitions
from pagemill.producer.wire.schema.outputs import Output, Result
from pagemill.producer.wire.store.store import Store, reference_to
from pagemill.producer.wire.store.stub import result_stub
from pagemill.worker.job_queue import Connectivity, JobQueue
from pagemill.worker.jobs.store.sweeper import StoreSweeper
from tests.chaos.fork_server import ForkServer
from tests.integration.storage.conftest import (
    OVER,
    TestedStore,
    deadlines,
    pass_time,
    stored_at,
)
from tests.worker.harness import QueueClient, eventually, process_settings

LARGE = "large " * 300


def sweeper_of(client: QueueClient, store: TestedStore) -> StoreSweeper:
    queue = JobQueue(client.url, client.queue, "sweeps", 6000, Connectivity(WorkerCounters()))
    return StoreSweeper(Store(store.url, OVER), queue)


def result_json(job_id: str, text: str) -> bytes:
    output = Output(index=0, text=text, token_ids=(1,), finish_reason="stop")
    return Result(id=job_id, outputs=(output,), model="echo").model_dump_json().encode()


def test_a_stale_worker_never_replaces_the_committed_file(client: QueueClient, files: TestedStore) -> None:
    place = Store(files.url, OVER)
    (job_id,) = client.submit({"prompt": "a"})
    tokens, uris = [], []
    for worker in ("stale", "live"):
        (job,) = client.run(transitions.pull(client.queue, worker, ["echo"], 1, 1000, 60_000)).jobs
        uri, body = place.new_uri(client.queue, "out", job_id), result_json(job_id, worker)
        client.run(stored.announce(client.queue, [uri]))
        place.write(uri, body)
        tokens.append((job.token, result_stub(reference_to(uri, body)), uri))
        uris.append(uri)
        if worker == "stale":
            client.redis.zadd(f"pagemill:{{{client.queue}}}:leases", {job_id: 1}, xx=True)
    words = [
        client.run(transitions.commit(client.queue, job_id, token, "succeeded", result_json=stub, stored=uri))
        for token, stub, uri in reversed(tokens)
    ]
    assert words == ["committed", "fenced"]
    stale, live = uris
    assert set(deadlines(client)) == {stale, live}
    assert deadlines(client)[stale] < deadlines(client)[live] - 3600
    sweeper = sweeper_of(client, files)
    # The hour of the stale file is over; the other one lives for a day.
    client.redis.zadd(f"pagemill:{{{client.queue}}}:stored", {stale: 1})
    assert sweeper.sweep() == 1
    assert files.names() == {live}
    with Producer(client.url, queue=client.queue, store=place) as producer:
        assert producer.job(job_id).result(timeout=5).text == "live"
    # The same commit again after a lost reply: the file stays unchanged.
    token, stub, uri = tokens[1]
    again = transitions.commit(client.queue, job_id, token, "succeeded", result_json=stub, stored=uri)
    assert client.run(again) == "already_done"
    assert set(deadlines(client)) == {live}


def test_a_sweeper_deletes_nothing_outside_its_store(
    client: QueueClient, files: TestedStore, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    inside = f"{files.url}/../precious"
    client.run(stored.announce(client.queue, [f"file://{precious}", inside], within_ms=0))
    assert sweeper_of(client, files).sweep() == 2
    assert precious.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "num_jobs"), [(3, 12), (12, 60)])
def test_kills_lose_no_result_and_leave_no_file(
    client: QueueClient, files: TestedStore, tmp_path: Path, rounds: int, num_jobs: int
) -> None:
    chance = random.Random(rounds)
    settings: dict[str, Any] = process_settings(
        client.url, client.queue, model="echo:1", max_num_seqs=4, store_url=files.url, store_over_bytes=OVER
    )
    place = Store(files.url, OVER)
    with (
        ForkServer(tmp_path, settings) as fork_server,
        Producer(client.url, queue=client.queue, store=place) as producer,
    ):
        rows = [{"prompt": f"{row} {LARGE}", "model": "echo", "max_tokens": 1900} for row in range(num_jobs)]
        batch = producer.submit_many(rows)
        for _ in range(rounds):
            worker = fork_server.spawn()
            before = batch.counts().ended
            eventually(
                lambda before=before: batch.counts().ended > before or batch.counts().done, "some ends"
            )
            if chance.random() < 0.5:
                eventually(lambda: batch.counts().running or batch.counts().done, "a running job")
            worker.signal(signal.SIGKILL)
            worker.wait()
        fork_server.spawn()
        batch.wait(timeout=300)
        items = list(batch.results(ordered=True))
        assert [item.result.text for item in items if item.result is not None] == [
            row["prompt"] for row in rows
        ]
        committed = {stored_at(client, item.id, "out") for item in items}
        assert None not in committed
        assert committed <= files.names()
        batch.ack(items[-1].cursor)
        pass_time(client)
        eventually(lambda: not deadlines(client), "the sweep")
        assert files.names() == set()
