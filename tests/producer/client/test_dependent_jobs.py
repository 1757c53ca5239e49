"""`after`, `when` and `on_parent_failure` through both producers and the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from pagemill import AsyncProducer, Condition, InvalidJob, Job, JobCancelled, JobDead, Producer
from pagemill.__main__ import app
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.envelope import rendered
from pagemill.producer.wire.schema.job import Job as WireJob
from pagemill.producer.wire.schema.signing import split_payload
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker


def echo(queue: Queue, pulled: PulledJob) -> None:
    """Commit the prompt with its placeholders filled; a prompt that begins with "fail" fails."""
    prompt = (
        rendered(WireJob.from_payload(pulled.payload), split_payload(pulled.payload).outputs).prompt or ""
    )
    queue.fail(pulled) if prompt.startswith("fail") else queue.commit(pulled, prompt)


def test_a_chain(queue: Queue) -> None:
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        first = producer.submit(prompt="one")
        second = producer.submit(prompt="{parent.text} two", after=[first])
        third = producer.submit(
            Job(prompt="{a.text}, {b.text}", model="m", after={"a": first.id, "b": second.id})
        )
        unwanted = producer.submit(prompt="x", after={"a": second}, when={"a": Condition(text=("three",))})
        assert third.status().waits_for == (first.id, second.id)
        with scripted_worker(queue.url, queue.name, echo):
            assert third.result(timeout=60).text == "one, one two"
            with pytest.raises(JobCancelled) as cancelled:
                unwanted.result(timeout=60)
    assert cancelled.value.code == "condition_false"


def test_a_dead_job_is_replayed_with_the_outputs_that_it_was_given(queue: Queue) -> None:
    given: list[str] = []

    def die_once(queue: Queue, pulled: PulledJob) -> None:
        payload = split_payload(pulled.payload)
        prompt = rendered(WireJob.from_payload(pulled.payload), payload.outputs).prompt or ""
        given.append(prompt)
        if prompt == "<one>" and given.count(prompt) == 1:
            queue.retry(pulled)
        else:
            queue.commit(pulled, prompt)

    with Producer(queue.url, queue=queue.name, model="m") as producer:
        first = producer.submit(prompt="one")
        second = producer.submit(prompt="<{parent.text}>", after=[first], max_attempts=1)
        with scripted_worker(queue.url, queue.name, die_once):
            with pytest.raises(JobDead):
                second.result(timeout=60)
            assert second.status().waits_for == ()
            replayed = producer.dead_letters().replay([second.id])
            again = replayed.jobs[second.id]
            assert producer.job(again).result(timeout=60).text == "<one>"


def test_every_job_of_a_producer_waits(queue: Queue) -> None:
    """For any number of rows: rows that are filled in quickly must wait too."""
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        first = producer.submit(prompt="one")
        with Producer(queue.url, queue=queue.name, model="m", defaults={"after": {"a": first.id}}) as waiting:
            batch = waiting.submit_many([{"prompt": f"{row} {{a.text}}"} for row in range(8)])
        with scripted_worker(queue.url, queue.name, echo):
            texts = {item.result.text for item in batch.results(timeout=60) if item.result is not None}
    assert texts == {f"{row} one" for row in range(8)}


async def test_a_chain_on_an_event_loop(queue: Queue) -> None:
    async with AsyncProducer(queue.url, queue=queue.name, model="m") as producer:
        first = await producer.submit(prompt="fail")
        second = await producer.submit(prompt="x", after={"a": first})
        third = await producer.submit(prompt="<{a.text}>", after={"a": second}, on_parent_failure="run")
        with scripted_worker(queue.url, queue.name, echo):
            with pytest.raises(
                JobCancelled, match=f"it waited for job {first.id}, which is failed"
            ) as cancelled:
                await second.result(timeout=60)
            assert (await third.result(timeout=60)).text == "<>"
    assert cancelled.value.code == "parent_failed"


def rows(count: int) -> list[dict[str, Any]]:
    """Pairs of a job and a job that waits for it."""
    found: list[dict[str, Any]] = []
    for n in range(count):
        found.append({"prompt": f"p{n}", "key": f"{n}/first"})
        found.append({"prompt": "{a.text}!", "key": f"{n}/second", "after": {"a": f"key:{n}/first"}})
    return found


@pytest.mark.slow
def test_a_batch_of_chains_over_several_calls(queue: Queue) -> None:
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        batch = producer.submit_many(rows(300), batch_id="b")
        with scripted_worker(queue.url, queue.name, echo):
            found = {item.key: item.result.text for item in batch.results(timeout=120) if item.result}
            again = producer.submit_many(rows(301), batch_id="b")  # the missing values are added
            assert again.wait(timeout=60).succeeded == 602
    assert found == {f"{n}/first": f"p{n}" for n in range(300)} | {
        f"{n}/second": f"p{n}!" for n in range(300)
    }


def test_rows_that_can_wait_for_nothing_are_failed_items(queue: Queue) -> None:
    given = [
        {"prompt": "a", "key": "a", "after": {"p": "key:c"}},
        {"prompt": "b", "key": "b", "after": {"p": "key:a"}},
        {"prompt": "c", "key": "c", "after": {"p": "key:b"}},
        {"prompt": "d", "key": "d", "after": ["nobody"]},
        {"prompt": "e", "key": "e", "after": ["key:d"]},
        {"prompt": "f", "key": "f", "after": ["key:e"], "on_parent_failure": "run"},
        {"prompt": "g", "key": "g", "top_q": 1},
        {"prompt": "h", "key": "h", "after": ["key:g"]},
    ]
    with Producer(queue.url, queue=queue.name, model="m", tenant="acme") as producer:
        batch = producer.submit_many(given)
        with scripted_worker(queue.url, queue.name, echo):
            items = {item.key: item for item in batch.results(timeout=60)}
        with pytest.raises(InvalidJob) as refused:
            producer.submit_many(given[:3], on_invalid="raise")
    ends = {key: item.error.code if item.error else item.state for key, item in items.items()}
    assert ends == {
        "a": "dependency_cycle", "b": "dependency_cycle", "c": "dependency_cycle", "d": "unknown_parent",
        "e": "parent_failed", "f": "succeeded", "g": "invalid_job", "h": "parent_failed",
    }  # fmt: skip
    assert refused.value.code == "dependency_cycle"


def test_a_row_that_is_too_large_ends_what_waits_for_it(queue: Queue) -> None:
    queue.client.hset(f"{queue.prefix}meta", "max_payload", 500)
    given = [{"prompt": "x" * 600, "key": "a"}, {"prompt": "b", "key": "b", "after": ["key:a"]}]
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        counts = producer.submit_many(given).counts()
    assert (counts.failed, counts.cancelled) == (1, 1)


def test_refusals_of_a_single_job(queue: Queue) -> None:
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        for after, code in (["nobody"], "unknown_parent"), (["own"], "dependency_cycle"):
            with pytest.raises(InvalidJob) as refused:
                producer.submit(prompt="a", job_id="own", after=after)
            assert (refused.value.code, refused.value.param) == (code, "after")


@pytest.mark.slow
def test_on_the_command_line(queue: Queue) -> None:
    def run(*words: str) -> str:
        options = ("--redis-url", queue.url, "--queue", queue.name)
        done = CliRunner().invoke(app, [*words, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output.strip()

    first = run("submit", "one", "--model", "m")
    words = ("submit", "{a.text} two", "--model", "m", "--after", f"a={first}")
    second = run(*words, "--field", 'when={"a": {"text": "one"}}')
    assert json.loads(run("status", second, "--json"))["waits_for"] == [first]
    assert f"waits for the end of\t{first}" in run("status", second)
    assert f"after\t{first}" in run("inspect", second)
    with scripted_worker(queue.url, queue.name, echo):
        assert run("result", second) == "one two"
        assert run("submit", "{parent.text}", "--model", "m", "--after", second, "--wait") == "one two"
