"""`pagemill queue limit | weights | quota`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pagemill.cli.queue import queue_app
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue


def command(queue: Queue, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(queue_app, [*arguments, "--redis-url", queue.url, "--queue", queue.name])
    assert result.exit_code == code, result.output
    return result.stdout


def test_limits(valkey_queue: Queue) -> None:
    queue = valkey_queue

    def limits(*options: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(command(queue, "limit", *options, "--json"))
        return found

    names = ("jobs", "payload_bytes", "rate", "burst", "memory_share")
    nothing = {"queue": queue.name} | dict.fromkeys(names)
    assert limits() == nothing
    assert limits("--jobs", "10", "--rate", "2.5") == nothing | {"jobs": 10, "rate": 2.5, "burst": 2}
    assert limits("--rate", "4")["burst"] == 4  # the burst was the default of a rate
    assert limits("--burst", "7")["burst"] == 7
    assert limits("--rate", "2.5")["burst"] == 7
    assert limits("--jobs", "0", "--payload-bytes", "5000")["jobs"] is None
    assert limits("--rate", "0")["burst"] is None
    assert limits("--memory-share", "0.5")["memory_share"] == 0.5
    assert limits("--memory-share", "0")["memory_share"] is None
    assert "5000" in command(queue, "limit")
    assert limits("--clear") == nothing
    command(queue, "limit", "--burst", "3", code=2)


def test_weights(valkey_queue: Queue) -> None:
    queue = valkey_queue
    assert command(queue, "weights") == ""
    assert json.loads(command(queue, "weights", "acme=3", "b=2", "--json")) == {"acme": 3, "b": 2}
    assert command(queue, "weights", "b=1") == "tenant\tweight\nacme\t3\n"


@pytest.mark.parametrize("wrong", ["acme", "acme=", "acme=x", "acme=-1"])
def test_a_weight_that_is_none_is_a_usage_error(valkey_queue: Queue, wrong: str) -> None:
    command(valkey_queue, "weights", wrong, code=2)


def test_quotas(valkey_queue: Queue) -> None:
    queue = valkey_queue
    assert command(queue, "quota") == ""
    command(queue, "quota", "--jobs-per-day", "5")
    command(queue, "quota", "acme", "--tokens-per-day", "1000", "--jobs-per-day", "2")
    queue.submit("a", tenant="acme")
    queue.pull_one()
    assert command(queue, "quota") == (
        "tenant\ttokens per minute\tjobs per minute\ttokens per day\tjobs per day\trunning\n"
        "*\t-\t-\t-\t5\t-\n"
        f"acme\t-\t-\t{1000 - cost()} of 1000\t1 of 2\t-\n"
    )
    found = json.loads(command(queue, "quota", "acme", "--tokens-per-day", "0", "--json"))
    assert found["acme"]["tokens_per_day"] is None
    assert found["acme"]["left"]["jobs_per_day"]["remaining"] == 1
    assert found["*"]["jobs_per_day"] == 5
    assert set(json.loads(command(queue, "quota", "acme", "--clear", "--json"))) == {"*"}
    command(queue, "quota", "a b", "--jobs-per-day", "1", code=2)
    command(queue, "quota", "acme", "--jobs-per-day", "-1", code=2)


def cost() -> int:
    return Job.parse({"prompt": "hello", "model": "m"}).cost_tokens()
