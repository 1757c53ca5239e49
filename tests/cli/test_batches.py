"""`pagemill batch list | status | results | cancel | ack`: the batches that producers submitted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pagemill import AsyncProducer, Producer
from pagemill.__main__ import app
from pagemill.producer.wire.calls import batches
from pagemill.producer.wire.server.discovery import URL_VARIABLE
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker

Pagemill = Callable[..., Result]


@pytest.fixture
def pagemill(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Pagemill:
    monkeypatch.setenv(URL_VARIABLE, queue.url)
    monkeypatch.setenv("PAGEMILL_QUEUE", queue.name)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["batch", *arguments])

    return run


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"row {i}", "model": "m", "key": f"k{i}"} for i in range(count)]


@pytest.mark.slow
def test_a_batch_from_its_listing_to_its_results(
    queue: Queue, producer: Producer, pagemill: Pagemill
) -> None:
    assert "has no batches" in pagemill("list").stderr
    producer.submit_many(rows(2), batch_id="first")
    producer.submit_many(rows(3), batch_id="second")
    (one,) = queue.pull(1)
    queue.commit(one, "text of one")
    listed = {info["id"]: info["counts"] for info in json.loads(pagemill("list", "--json").stdout)}
    assert {name: counts["total"] for name, counts in listed.items()} == {"first": 2, "second": 3}
    header, *lines = pagemill("list").stdout.splitlines()
    assert header.split("\t")[:4] == ["batch", "created", "jobs", "queued"]
    assert len(lines) == 2
    assert len(pagemill("list", "--limit", "1").stdout.splitlines()) == 2

    status = json.loads(pagemill("status", "first", "--json").stdout)
    assert (status["total"], status["succeeded"], status["queued"], status["done"]) == (2, 1, 1, False)
    assert ["jobs", "1 of 2 ended"] in [
        line.split("\t") for line in pagemill("status", "first").stdout.splitlines()
    ]

    early = pagemill("results", "first", "--timeout", "0")
    assert early.exit_code == 1
    (line,) = map(json.loads, early.stdout.splitlines())
    assert (line["key"], line["result"]["outputs"][0]["text"]) == ("k0", "text of one")
    assert "1 of 2 jobs of batch first have ended" in early.stderr
    assert "pagemill batch cancel ID" in early.stderr

    assert "1 jobs of batch first are cancelled" in pagemill("cancel", "first").stderr
    whole = pagemill("results", "first", "--ordered")
    assert whole.exit_code == 0
    assert [json.loads(line)["state"] for line in whole.stdout.splitlines()] == ["succeeded", "cancelled"]
    rest = pagemill("results", "first", "--after", line["cursor"])
    assert [json.loads(found)["key"] for found in rest.stdout.splitlines()] == ["k1"]


@pytest.mark.parametrize("command", ["status", "results", "cancel"])
def test_an_unknown_batch_is_an_error(command: str, pagemill: Pagemill) -> None:
    done = pagemill(command, "nowhere")
    assert done.exit_code == 1
    assert "no batch nowhere" in done.stderr
    assert pagemill(command, "no id").exit_code == 2


def test_many_batches_are_listed_in_pages(
    queue: Queue, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "LIST_BATCHES", 2)
    for name in "abcde":
        producer.submit_many(rows(1), batch_id=name)
    assert sorted(info.id for info in producer.batches()) == list("abcde")
    assert all(info.counts.total == 1 and info.created_at > 0 for info in producer.batches())
    found = queue.run(batches.listed(queue.name, 0, 10**6))
    assert len(found) == 5


async def test_so_they_are_on_asyncio(queue: Queue, producer: Producer) -> None:
    producer.submit_many(rows(1), batch_id="a")
    async with AsyncProducer(queue.url, queue=queue.name) as aio:
        assert [info.id async for info in aio.batches()] == ["a"]


def test_acknowledged_results_are_freed(queue: Queue, producer: Producer, pagemill: Pagemill) -> None:
    producer.submit_many(rows(3), batch_id="read")
    for job in queue.pull(2):
        queue.commit(job, "text")
    (first, _) = map(json.loads, pagemill("results", "read", "--timeout", "0").stdout.splitlines())
    assert "1 results" in pagemill("ack", "read", "--up-to", first["cursor"]).stderr
    assert "1 results" in pagemill("ack", "read").stderr
    assert pagemill("results", "read", "--timeout", "0").stdout == ""
    assert json.loads(pagemill("status", "read", "--json").stdout)["queued"] == 1
    assert pagemill("ack", "unknown").exit_code == 1


def test_the_completion_window_is_by_the_servers_clock(
    queue: Queue, pagemill: Pagemill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "m", "prompt": "p"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() - 7200)
    with scripted_worker(queue.url, queue.name):
        done = pagemill("run", str(tmp_path / "in.jsonl"), "--within", "1", "--json")
    assert json.loads(done.stdout)["completed"] == 1
