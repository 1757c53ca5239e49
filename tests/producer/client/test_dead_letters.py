"""Dead letters: listed, opened, replayed once, purged; from the wire to the command line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pagemill import AsyncProducer, JobDead, JobNotFound, Producer
from pagemill.__main__ import app
from pagemill.producer.wire.calls import dead_letters, submissions, transitions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import ErrorInfo
from tests.producer.driving import Queue, delta
from tests.producer.scripted_worker import scripted_worker


def die(queue: Queue, job_id: str, code: str = "engine_error", **fields: object) -> None:
    """Submit a job and let it use up its one attempt."""
    queue.submit(job_id, max_attempts=1, **fields)
    job = queue.pull_one()
    error = ErrorInfo(code=code, message="it broke", retryable=True)
    assert queue.run(transitions.retry(queue.name, job_id, job.token, error, 0.0)) == "dead"


def crash(queue: Queue, job_id: str) -> None:
    queue.submit(job_id)
    for _ in range(5):
        queue.checkpoint(queue.pull_one())
        queue.lapse(job_id)
        queue.sweep()


def test_letters_say_why_and_of_what(queue: Queue, producer: Producer) -> None:
    die(queue, "a", tenant="acme", priority="high", metadata={"row": 1})
    die(queue, "b", code="out_of_memory")
    crash(queue, "c")
    letters = {letter.id: letter for letter in producer.dead_letters().list()}
    assert list(letters) == ["c", "b", "a"]
    a = letters["a"]
    assert (a.code, a.cause, a.attempts, a.tenant, a.priority, a.metadata) == (
        "attempts_exhausted", "engine_error", 1, "acme", "high", {"row": 1},
    )  # fmt: skip
    assert a.created_at <= a.died_at
    assert (letters["c"].code, letters["c"].cause, letters["c"].crashes) == ("crash_suspect", "", 5)
    for error, ids in {"engine_error": ["a"], "attempts_exhausted": ["b", "a"], "none": []}.items():
        assert [letter.id for letter in producer.dead_letters().list(error)] == ids


def test_a_letter_opens(queue: Queue, producer: Producer) -> None:
    queue.submit("a", max_attempts=1, prompt="what was asked")
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, 2, text="so far"))
    queue.retry(job)
    opened = producer.dead_letters().show("a")
    assert Job.from_payload(opened.payload).prompt == "what was asked"
    assert [output.text for output in opened.partial] == ["so far"]
    queue.submit("b")
    for other in ("b", "none"):
        with pytest.raises(JobNotFound):
            producer.dead_letters().show(other)


def test_a_replay_is_a_new_job_and_happens_once(queue: Queue, producer: Producer) -> None:
    die(queue, "a", metadata={"row": 1}, tenant="acme", ttl=3600.0, seed=5)
    first = producer.dead_letters().replay()
    assert list(first.jobs) == ["a"]
    again = producer.dead_letters().replay(["a", "a"])
    assert (again.jobs, again.already) == ({}, first.jobs)
    handle = producer.job(first.jobs["a"])
    status = handle.status()
    assert (status.replay_of, status.tenant, status.metadata) == ("a", "acme", {"row": 1})
    assert status.deadline == pytest.approx(status.created_at + 3600.0), "a ttl counts anew"
    assert queue.state("a") == "dead"
    assert [letter.replayed_as for letter in producer.dead_letters().list()] == [handle.id]
    job = queue.pull_one()
    assert (Job.from_payload(job.payload).seed, job.attempt, job.checkpoint) == (5, 1, None)
    queue.commit(job, "well")
    assert handle.result(timeout=120).text == "well"
    assert producer.dead_letters().replay().already == first.jobs, "also after the replay succeeded"
    with pytest.raises(JobDead):
        producer.job("a").result()


def test_a_replay_that_was_stopped_may_be_repeated(queue: Queue, producer: Producer) -> None:
    die(queue, "a")
    first = producer.dead_letters().replay().jobs["a"]
    producer.job(first).cancel()
    second = producer.dead_letters().replay().jobs["a"]
    assert second != first


def test_a_replayed_submit_that_is_sent_twice_is_one_job(queue: Queue) -> None:
    die(queue, "a")
    item = submissions.prepare(Job.parse({"prompt": "p", "model": "m"}), "new", replay_of="a")
    call = submissions.submit(queue.name, [item])
    assert [queue.run(call)[0].status for _ in range(2)] == ["created", "exists"]
    assert len(queue.pull()) == 1


def test_replay_by_id_and_by_error(queue: Queue, producer: Producer) -> None:
    die(queue, "a")
    die(queue, "b", code="out_of_memory")
    die(queue, "c", code="out_of_memory")
    dead = producer.dead_letters()
    assert list(dead.replay(error="out_of_memory").jobs) == ["b", "c"], "in the order they died"
    done = dead.replay(["a", "none", "b"])
    assert (list(done.jobs), list(done.already), list(done.refused)) == (["a"], ["b"], ["none"])


def test_a_replay_drops_the_delay_and_the_deadline_that_passed(queue: Queue, producer: Producer) -> None:
    queue.submit("a", max_attempts=1, delay=3600, deadline=2e9)
    queue.make_due("a")
    queue.retry(queue.pull_one())
    (new,) = producer.dead_letters().replay().jobs.values()
    status = producer.job(new).status()
    assert (status.state, status.deadline) == ("queued", None)


def test_an_idempotency_key_leads_to_whoever_has_it_now(queue: Queue, producer: Producer) -> None:
    die(queue, "a", idempotency_key="k")
    die(queue, "b", idempotency_key="l", prompt="other")
    queue.submit("new", idempotency_key="k")
    queue.submit("conflicting", idempotency_key="l")
    done = producer.dead_letters().replay()
    assert done.already == {"a": "new"}
    assert "conflicting" in done.refused["b"]


def test_what_can_not_be_read_is_refused_alone(queue: Queue, producer: Producer) -> None:
    lane = keys.lane("1", "normal", "default", "m")
    header = json.dumps({"id": "bad", "lane": lane, "cost": 1, "max_attempts": 1}).encode()
    queue.run(submissions.submit(queue.name, [Submission("bad", header, b"no job")]))
    queue.retry(queue.pull_one())
    die(queue, "good")
    done = producer.dead_letters().replay()
    assert (list(done.jobs), list(done.refused)) == (["good"], ["bad"])


def test_purged_letters_leave_nothing(queue: Queue, producer: Producer) -> None:
    die(queue, "a", metadata={"x": 1})
    die(queue, "b")
    dead = producer.dead_letters()
    dead.replay(["b"])
    assert [dead.purge(replayed=True), dead.purge(["a", "none"]), dead.purge()] == [1, 1, 0]
    assert not any(name.endswith((":a", ":b")) or name == "dead" for name in queue.names())
    with pytest.raises(JobNotFound):
        producer.job("a").status()


def test_only_the_dead_are_purged(queue: Queue) -> None:
    queue.submit("a")
    assert queue.run(dead_letters.purge(queue.name, ["a"])) == 0
    assert queue.state("a") == "queued"


def test_a_purged_row_stays_in_its_batch(queue: Queue, producer: Producer) -> None:
    fields = {"prompt": "die", "model": "m", "max_attempts": 1}
    batch = producer.submit_many([fields, fields | {"prompt": "good"}])
    dead, good = queue.pull()
    queue.retry(dead)
    queue.commit(good)
    assert producer.dead_letters().purge() == 1
    assert sorted(item.state for item in batch.results()) == ["dead", "succeeded"]
    assert list(producer.dead_letters().list()) == []


def test_pages_are_read_to_the_end(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit(*(f"j{i}" for i in range(600)), max_attempts=1)
    while jobs := queue.pull(200):
        for job in jobs:
            queue.retry(job)
    with Producer(queue.url, queue=queue.name) as producer:
        assert len({letter.id for letter in producer.dead_letters().list()}) == 600
        assert len(producer.dead_letters().replay().jobs) == 600
        with scripted_worker(queue.url, queue.name):
            assert producer.dead_letters().purge() == 600


async def test_asynchronously(valkey_queue: Queue) -> None:
    queue = valkey_queue
    die(queue, "a")
    async with AsyncProducer(queue.url, queue=queue.name) as producer:
        dead = producer.dead_letters()
        assert [letter.id async for letter in dead.list()] == ["a"]
        assert (await dead.show("a")).letter.cause == "engine_error"
        assert list((await dead.replay()).jobs) == ["a"]
        assert await dead.purge(replayed=True) == 1


def command(queue: Queue, *arguments: str, code: int = 0) -> str:
    place = ["--redis-url", queue.url, "--queue", queue.name]
    result = CliRunner().invoke(app, ["dead", *arguments, *place])
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.mark.slow
def test_commands(queue: Queue) -> None:
    assert command(queue, "list") == ""
    die(queue, "a", prompt="a secret")
    die(queue, "b", code="out_of_memory")
    assert [line.split("\t")[0] for line in command(queue, "list").splitlines()] == ["job", "b", "a"]
    assert "secret" not in command(queue, "list", "--json")
    shown = json.loads(command(queue, "show", "a", "--json"))
    assert (shown["cause"], shown["job"]["prompt"]) == ("engine_error", "a secret")
    assert "a secret" in command(queue, "show", "a")
    done = json.loads(command(queue, "replay", "--error", "engine_error", "--json"))
    assert list(done["jobs"]) == ["a"]
    assert command(queue, "replay", "none", code=1) == ""
    assert json.loads(command(queue, "purge", "--replayed", "--json")) == {"purged": 1}
    assert json.loads(command(queue, "purge", "--all", "--json")) == {"purged": 1}
    assert command(queue, "show", "a", code=1) == ""
    for wrong in (["replay"], ["purge", "a", "--all"], ["replay", "a", "--error", "x"]):
        command(queue, *wrong, code=2)
