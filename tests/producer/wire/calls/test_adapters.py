"""Jobs with adapters: their lanes, envelope and digest, and commands to workers."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from pagemill.producer.wire.calls import adapters, registry, submissions
from pagemill.producer.wire.calls.adapters import AdapterAnswer, WorkerCommand
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.signing import Keys
from tests.producer.driving import Queue

WORKER = WorkerInfo(id="w1", models=("m", "alias"), adapters=("red", "blue"))


def test_its_lane_names_the_adapter() -> None:
    job = Job.parse({"prompt": "x", "model": "m", "adapter": "red"})
    assert json.loads(job.to_payload()) == {"v": 1, "prompt": "x", "model": "m", "adapter": "red"}
    assert Job.from_payload(job.to_payload()) == job
    assert submissions.lane_of(job) == "1:1:default:m#red"
    for fields in ({"adapter": "a#b"}, {"adapter": ""}, {"adapter": "red", "task": "embed"}):
        with pytest.raises(InvalidJob):
            Job.parse({"prompt": "x", "model": "m"} | fields)


def test_an_adapter_is_part_of_the_work() -> None:
    jobs = [
        Job.parse({"prompt": "x" * 300, "model": "m", "temperature": 0.0} | more)
        for more in ({}, {"adapter": "red"}, {"adapter": "blue"})
    ]
    assert len({job.digest() for job in jobs}) == 3
    assert len({job.affinity() for job in jobs}) == 3


def test_workers_are_given_what_they_serve(queue: Queue) -> None:
    for name in (None, "red", "green"):
        queue.submit(f"job-{name}", adapter=name)
    assert [job.job_id for job in queue.pull(models=("m",))] == ["job-None"]
    assert WORKER.lanes() == ["m", "alias", "m#red", "alias#red", "m#blue", "alias#blue"]
    assert [job.job_id for job in queue.pull(models=tuple(WORKER.lanes()))] == ["job-red"]
    assert queue.state("job-green") == "queued"


def test_adapters_take_turns(queue: Queue) -> None:
    lanes = ("m", *(keys.lane_model("m", name) for name in ("red", "blue")))
    queue.submit(*(f"red-{n}" for n in range(200)), adapter="red")
    for name in (None, "blue"):
        queue.submit(*(f"{name}-{n}" for n in range(20)), adapter=name)
    pulled = Counter(job.job_id.partition("-")[0] for job in queue.pull(60, models=lanes))
    assert pulled == {"red": 20, "None": 20, "blue": 20}


def test_commands_and_answers(queue: Queue) -> None:
    queue.run(registry.heartbeat(queue.name, WORKER))
    command = WorkerCommand(id="c1", action="add", name="red", source="/x")
    assert queue.run(adapters.send_command(queue.name, ["w1", "w2"], command, Keys())) == 2
    assert queue.run(adapters.send_command(queue.name, ["w1", "w2"], command, Keys())) == 0, "sent twice"
    (stored,) = queue.client.lrange(keys.commands(queue.name, "w1"), 0, -1)
    assert WorkerCommand.model_validate_json(stored).source == "/x"
    assert queue.client.pttl(keys.commands(queue.name, "w1")) > 0
    queue.run(adapters.answer(queue.name, "c1", "w2", AdapterAnswer(error="no")))
    queue.run(adapters.answer(queue.name, "c1", "w1", AdapterAnswer()))
    answers = queue.run(adapters.answers(queue.name, "c1"))
    assert {name: answer.error for name, answer in answers.items()} == {"w1": None, "w2": "no"}
    assert queue.client.pttl(f"{queue.prefix}answers:c1") > 0
    for number in range(100):
        again = command.model_copy(update={"id": f"d{number}"})
        queue.run(adapters.send_command(queue.name, ["w1"], again, Keys()))
    assert queue.client.llen(keys.commands(queue.name, "w1")) == 64


def test_a_command_is_signed_for_one_worker() -> None:
    signing, other = Keys(["k" * 32]), Keys(["x" * 32])
    stored = signing.sign_command(b'{"id":"c"}', queue="q", worker_id="w1")
    assert signing.check_command(stored, queue="q", worker_id="w1") == b'{"id":"c"}'
    assert Keys().check_command(stored, queue="q", worker_id="w1") == b'{"id":"c"}'
    for keyring, worker, body in (
        (other, "w1", stored),
        (signing, "w2", stored),
        (signing, "w1", b'{"id":"c"}'),
    ):
        with pytest.raises(InvalidJob, match="not signed"):
            keyring.check_command(body, queue="q", worker_id=worker)
