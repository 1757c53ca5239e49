"""Jobs that name a revision of their model: envelope, lane, workers, and the status while no worker runs them."""

from __future__ import annotations

import json

import pytest

from pagemill.common.fingerprint import revision_of
from pagemill.producer.wire.calls import registry, submissions
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue

OLD = WorkerInfo(id="old", models=("m",), adapters=("red",), revision="r1")
NEW = WorkerInfo(id="new", models=("m",), adapters=("red",), revision="r2")


def test_its_lane_names_the_revision() -> None:
    job = Job.parse({"prompt": "x", "model": "m", "revision": "r1"})
    assert json.loads(job.to_payload()) == {"v": 1, "prompt": "x", "model": "m", "revision": "r1"}
    assert Job.from_payload(job.to_payload()) == job
    assert submissions.lane_of(job) == "1:1:default:m~r1"
    adapted = Job.parse({"prompt": "x", "model": "m", "adapter": "red", "revision": "r1"})
    assert submissions.lane_of(adapted) == "1:1:default:m#red~r1"
    assert keys.split_lane("1:1:default:m#red~r1") == ("1", "normal", "default", "m#red")
    for revision in ("a~b", "", "x" * 65):
        with pytest.raises(InvalidJob):
            Job.parse({"prompt": "x", "model": "m", "revision": revision})


def test_a_whole_commit_is_named_as_workers_name_it() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    assert Job.parse({"prompt": "x", "model": "m", "revision": commit}).revision == commit[:12]
    assert revision_of(f"feedfacefeedface@{commit[:12]}") == commit[:12]
    assert revision_of("feedfacefeedface") == "feedfacefeedface"


def test_a_revision_is_part_of_the_work() -> None:
    work = {"prompt": "x", "model": "m", "temperature": 0.0}
    assert len({Job.parse(work | more).digest() for more in ({}, {"revision": "a"}, {"revision": "b"})}) == 3


def test_only_workers_of_the_revision_take_it(queue: Queue) -> None:
    queue.submit("any")
    queue.submit("first", revision="r1", adapter="red")
    queue.submit("second", revision="r2")
    assert OLD.lanes() == ["m", "m#red", "m~r1", "m#red~r1"]
    assert {job.job_id for job in queue.pull(models=tuple(OLD.lanes()))} == {"any", "first"}
    assert [job.job_id for job in queue.pull(worker="w2", models=tuple(NEW.lanes()))] == ["second"]


def test_a_job_that_comes_back_waits_for_the_revision_again(queue: Queue) -> None:
    queue.submit("a", revision="r1")
    queue.release(queue.pull_one(models=("m~r1",)))
    assert queue.pull(models=("m", "m~r2")) == []
    queue.retry(queue.pull_one(models=("m~r1",)))
    assert queue.pull(models=("m", "m~r2")) == []
    assert queue.pull_one(models=("m~r1",)).attempt == 2


def test_whoever_asks_is_told_which_revisions_are_served(queue: Queue) -> None:
    queue.submit("a", revision="r3")
    assert queue.status("a").error == "no live worker serves revision r3 of model m: no live worker names one"
    for info in (NEW, OLD):
        queue.run(registry.heartbeat(queue.name, info))
    assert (
        queue.status("a").error == "no live worker serves revision r3 of model m: live workers serve r1, r2"
    )
    queue.submit("b", revision="r2")
    assert queue.status("b").error is None
    queue.run(registry.unregister(queue.name, "new"))
    assert queue.status("b").error == "no live worker serves revision r2 of model m: live workers serve r1"
