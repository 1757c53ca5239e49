"""`pagemill usage`, and the same from Python."""

from __future__ import annotations

import asyncio
import csv
import json
from datetime import date, timedelta
from pathlib import Path

import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from pagemill import AsyncProducer, Producer
from pagemill.__main__ import app
from pagemill.producer.wire.calls.metering import usage
from pagemill.producer.wire.calls.metering.usage import JobUsage
from pagemill.producer.wire.schema.errors import InvalidJob
from tests.producer.driving import Queue


def command(queue: Queue, *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["usage", *arguments, "--redis-url", queue.url, "--queue", queue.name])
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def days(valkey_queue: Queue) -> list[date]:
    """The queue has jobs of two tenants today, and rows of the two days before."""
    queue = valkey_queue
    queue.submit("a", "b", tenant="acme")
    queue.submit("c", tenant="beta")
    for job in queue.pull():
        queue.commit(job, used=JobUsage(10, 4, 3, 0.25))
    queue.run(usage.days(queue.name))
    ((today, _),) = queue.client.zrange(f"{queue.prefix}usage", 0, -1, withscores=True)
    for past in (1, 2):
        number = int(today) - past
        queue.client.zadd(f"{queue.prefix}usage", {str(number): number})
        queue.client.hset(f"{queue.prefix}usage:{number}", "acme:m web", f"{past} 5 0 5 1000")
    return [date(1970, 1, 1) + timedelta(days=int(today) - past) for past in (2, 1, 0)]


def test_the_rows(valkey_queue: Queue, days: list[date]) -> None:
    lines = command(valkey_queue).splitlines()
    assert lines[0].split("\t") == [
        "day", "tenant", "model", "api_key", "jobs", "prompt_tokens", "cached_tokens", "completion_tokens", "device_s",
    ]  # fmt: skip
    assert [line.split("\t") for line in lines[1:]] == [
        [str(days[0]), "acme", "m", "web", "2", "5", "0", "5", "1.0"],
        [str(days[1]), "acme", "m", "web", "1", "5", "0", "5", "1.0"],
        [str(days[2]), "acme", "m", "", "2", "20", "8", "6", "0.5"],
        [str(days[2]), "beta", "m", "", "1", "10", "4", "3", "0.25"],
    ]


def test_some_of_them(valkey_queue: Queue, days: list[date]) -> None:
    def jobs(*arguments: str) -> list[int]:
        return [row["jobs"] for row in json.loads(command(valkey_queue, "--json", *arguments))]

    assert jobs("--since", str(days[1])) == [1, 2, 1]
    assert jobs("--until", str(days[1])) == [2, 1]
    assert jobs("--tenant", "acme", "--by", "tenant") == [5]
    assert jobs("--model", "other") == []
    assert json.loads(command(valkey_queue, "--json", "--by", "tenant")) == [
        {
            "tenant": "acme", "jobs": 5,
            "prompt_tokens": 30, "cached_tokens": 8, "completion_tokens": 16, "device_s": 2.5,
        },
        {
            "tenant": "beta", "jobs": 1,
            "prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 3, "device_s": 0.25,
        },
    ]  # fmt: skip


def test_files(valkey_queue: Queue, days: list[date], tmp_path: Path) -> None:
    expected = json.loads(command(valkey_queue, "--json"))
    for name in ("usage.csv", "usage.parquet", "usage.json"):
        assert command(valkey_queue, "--out", str(tmp_path / name)) == ""
    assert parquet.read_table(tmp_path / "usage.parquet").to_pylist() == expected
    assert json.loads((tmp_path / "usage.json").read_text()) == expected
    with (tmp_path / "usage.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{k: str(v) for k, v in row.items()} for row in expected]
    assert len(list(tmp_path.iterdir())) == 3
    parquet_of_nothing = tmp_path / "none.parquet"
    command(valkey_queue, "--tenant", "nobody", "--out", str(parquet_of_nothing))
    assert parquet.read_table(parquet_of_nothing).schema.names == list(expected[0])


@pytest.mark.parametrize(
    "wrong",
    [
        ("--since", "yesterday"), ("--by", "state"), ("--tenant", "a b"),
        ("--out", "x.xlsx"), ("--out", "/no/such/folder/x.csv"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_a_usage_error(valkey_queue: Queue, wrong: tuple[str, str]) -> None:
    command(valkey_queue, *wrong, code=2)


def test_from_python(valkey_queue: Queue, days: list[date]) -> None:
    with Producer(valkey_queue.url, queue=valkey_queue.name) as producer:
        found = producer.usage(since=days[1], by=["tenant"])
        assert [(row.tenant, row.jobs, row.day) for row in found] == [("acme", 3, ""), ("beta", 1, "")]
        with pytest.raises(InvalidJob):
            producer.usage(by=["prompt"])

    async def ask() -> object:
        async with AsyncProducer(valkey_queue.url, queue=valkey_queue.name) as other:
            return await other.usage(since=days[1], by=["tenant"])

    assert asyncio.run(ask()) == found
