"""`pagemill queue limit | weights`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pagemill.cli.queue import queue_app
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
    assert limits("--burst", "7")["burst"] == 7
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
