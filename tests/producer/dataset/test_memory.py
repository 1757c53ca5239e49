"""A run with more rows than fit into the server's memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagemill import Producer
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker
from tests.producer.small_server import flood, small_server

ROWS = 1500
TEXT = "x" * 30_000


def number(queue: Queue, pulled: PulledJob) -> None:
    """Commit the prompt's first word."""
    queue.commit(pulled, (Job.from_payload(pulled.payload).prompt or "").partition(" ")[0][:9])


@pytest.mark.slow
def test_a_run_waits_for_room_and_goes_on(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"text": f"{i} {TEXT}"}) + "\n" for i in range(ROWS)))
    with small_server(tmp_path) as queue:
        flood(queue)
        queue.client.set("junk", "x" * 1_000_000, ex=3)
        with Producer(queue.url, queue="q") as producer, scripted_worker(queue.url, "q", run=number):
            pipeline = Pipeline("{{ text }}", model="m", chat=False)
            summary = pipeline.run(source, out=out, producer=producer)
        assert (summary.rows, summary.succeeded) == (ROWS, ROWS)
        texts = [json.loads(line)["output"] for line in out.read_text().splitlines()]
        assert texts == [str(i) for i in range(ROWS)]
        assert registry.stats(queue.run, "q").memory.refused > 0
