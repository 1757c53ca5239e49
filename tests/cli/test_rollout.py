"""`pagemill rollout`, and the same from Python."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from pagemill import AsyncProducer, Producer, Rollout, RolloutRefused
from pagemill.cli.rollout import rollout_app
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.metering import usage
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker


def command(queue: Queue, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(rollout_app, [*arguments, "--redis-url", queue.url, "--queue", queue.name])
    assert result.exit_code == code, result.output
    return result.output


def document(queue: Queue, *arguments: str) -> dict[str, Any]:
    (found,) = json.loads(command(queue, *arguments, "--json"))
    return dict(found)


@pytest.fixture
def queue(valkey_queue: Queue) -> Queue:
    for name, revision in (("old", "r1"), ("new", "r2"), ("new-2", "r2")):
        info = WorkerInfo(id=name, models=("m",), revision=revision)
        valkey_queue.run(registry.heartbeat(valkey_queue.name, info))
    return valkey_queue


def test_a_rollout_from_start_to_finish(queue: Queue) -> None:
    started = document(queue, "start", "m", "--to", "r2", "--share", "5%")
    assert (started["state"], started["share"], started["to"], started["margin"]) == (
        "open",
        0.05,
        "r2",
        0.05,
    )
    assert (started["canary"]["workers"], started["stable"]["workers"]) == (2, 1)
    assert document(queue, "raise", "m", "--share", "0.5")["share"] == 0.5
    queue.submit(*(f"job-{number}" for number in range(100)))
    waits = document(queue, "status", "m")
    assert waits["canary"]["waiting"] + waits["stable"]["waiting"] == 100
    assert 25 < waits["canary"]["waiting"] < 75
    assert document(queue, "halt", "m")["state"] == "halted"
    assert "halted: no new jobs for the canary" in command(queue, "status")
    assert document(queue, "rollback", "m")["state"] == "back"
    assert "over" in command(queue, "raise", "m", "--share", "1%", code=1)
    assert "is over" in command(queue, "finish", "m")
    assert len(queue.pull(100)) == 100
    assert "there is no rollout" in command(queue, "status")
    assert "m has no rollout" in command(queue, "finish", "m", code=1)
    assert not any(
        "rollout" in name or name.startswith(("ran:", "sampled:", "canary:")) for name in queue.names()
    )


def test_status_shows_both_sides(queue: Queue) -> None:
    command(queue, "start", "m", "--to", "r2", "--share", "50%", "--halt-margin", "100%")
    queue.submit(*(f"job-{number}" for number in range(40)))
    sides = {"canary": queue.pull(models=("m", "m~r2"), worker="new"), "stable": queue.pull(worker="old")}
    queue.fail(sides["canary"][0], code="engine_error")
    for jobs in sides.values():
        for job in jobs:
            queue.commit(job)
    found = document(queue, "status", "m")
    assert (found["canary"]["jobs"], found["canary"]["failures"]) == (10, 1)
    assert found["canary"]["failure_rate"] == 0.1
    assert (found["stable"]["jobs"], found["stable"]["failures"]) == (10, 0)
    lines = command(queue, "status").splitlines()
    assert "m: 50% of the jobs, by id, to r2; open" in lines
    header = next(line for line in lines if line.startswith("side")).split("\t")
    canary = next(line for line in lines if line.startswith("canary")).split("\t")
    assert dict(zip(header, canary, strict=True))["rate"] == "10.0%"


def test_what_can_not_be_is_refused(queue: Queue) -> None:
    told = command(queue, "start", "m", "--to", "r3", "--share", "5%", code=1)
    assert "no live worker of m announces revision r3 (they announce: r1, r2)" in told
    command(queue, "start", "m", "--to", "r3", "--share", "5%", "--force")
    assert "another rollout" in command(queue, "start", "m", "--to", "r2", "--share", "5%", code=1)
    for share in ("120%", "-1", "many", "2"):
        command(queue, "raise", "m", "--share", share, code=2)
    command(queue, "start", "m", "--to", "a~b", "--share", "5%", code=2)
    command(queue, "start", "m", "--to", "r2", "--share", "5%", "--by", "luck", code=2)
    assert "x has no rollout" in command(queue, "status", "x", code=1)


def committing(revision: str) -> Any:
    """A worker that writes the revision's name if the prompt's number is odd, and otherwise the same as others."""

    def run(queue: Queue, pulled: PulledJob) -> None:
        prompt = Job.from_payload(pulled.payload).prompt or ""
        is_odd = int(prompt.split()[-1]) % 2
        queue.commit(pulled, f"{prompt} {revision}" if is_odd else prompt)

    return run


def test_agreement_is_counted_on_the_stable_revision(queue: Queue) -> None:
    command(queue, "start", "m", "--to", "r2", "--share", "100%")
    for number in range(20):
        queue.submit(f"job-{number}", prompt=f"number {number}")
    new = scripted_worker(queue.url, queue.name, committing("r2"), ("m", "m~r2"))
    with new, Producer(queue.url, queue=queue.name) as producer:
        for number in range(20):
            producer.job(f"job-{number}").result(timeout=60)
        with scripted_worker(queue.url, queue.name, committing("r1"), ("m", "m~r1")):
            told = command(queue, "compare", "m", "--sample", "100", code=1)
            verdicts = list(producer.rollout("m").compare(100))
    one = next(found for found in verdicts if found.exactness == "neither")
    assert "10 of 20 outputs agree" in told
    assert told.count("differs\ttext of output 0 at ") == 10
    assert one.comparison is not None
    assert one.comparison.difference is not None
    found = document(queue, "status", "m")
    assert (found["compared"], found["agreed"]) == (20, 10)
    assert found["canary"]["jobs"] == 20  # copies do not count on either side
    assert found["stable"]["jobs"] == 0
    (day,) = queue.run(usage.days(queue.name))
    assert [row.jobs for row in queue.run(usage.rows(queue.name, day))] == [20]


def test_nothing_to_compare_is_no_agreement(queue: Queue) -> None:
    command(queue, "start", "m", "--to", "r2", "--share", "5%")
    assert "0 of 0 outputs agree" in command(queue, "compare", "m", code=4)
    queue.run(registry.unregister(queue.name, "old"))
    assert "no live worker of m announces a revision in addition to r2" in command(
        queue, "compare", "m", code=1
    )


def test_asyncio_has_the_same(queue: Queue) -> None:
    async def operate() -> None:
        async with AsyncProducer(queue.url, queue=queue.name) as producer:
            rollout = producer.rollout("m")
            assert (await rollout.start(Rollout("r2", 0.05, by="tenant"))).by == "tenant"
            assert (await rollout.set_share(0.1)).share == 0.1
            assert (await rollout.halt()).state == "halted"
            assert [found async for found in rollout.compare()] == []
            assert (await rollout.roll_back()).state == "back"
            await rollout.finish()
            for wrong in (Rollout("r2", 1.5), Rollout("r2", 0.5, margin=-1), Rollout("r2", 0.5, least=0)):
                with pytest.raises(RolloutRefused):
                    await rollout.start(wrong)
            with pytest.raises(RolloutRefused, match="m has no rollout"):
                await rollout.status()

    asyncio.run(operate())
