"""Stores for the tests: a folder, and a bucket of a local S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.store.stub import read_payload_stub, read_result_stub
from pagemill.worker.jobs.store import sweeper
from pagemill.worker.worker import Worker
from tests.worker.harness import QueueClient, eventually, worker_config

OVER = 1500
"""Larger payloads go to the store."""


@dataclass
class TestedStore:
    """A store and its files, accessed without Pagemill."""

    url: str
    names: Callable[[], set[str]]
    """The URIs of its files."""
    write: Callable[[str, bytes], None]
    remove: Callable[[str], None]

    __test__ = False


def folder(path: Path) -> TestedStore:
    def at(uri: str) -> Path:
        return Path(uri.removeprefix("file://"))

    def write(uri: str, data: bytes) -> None:
        at(uri).write_bytes(data)

    return TestedStore(
        f"file://{path}",
        lambda: {f"file://{file}" for file in path.rglob("*") if file.is_file()},
        write,
        lambda uri: at(uri).unlink(),
    )


@pytest.fixture(autouse=True)
def _sweeps_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "LOOK_S", 0.1)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint: str, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> TestedStore:
    settings = {
        "AWS_ENDPOINT_URL": s3_endpoint, "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    client: Any = boto3.client("s3")
    name = f"jobs-{queue_name}"[:60].lower().replace("_", "-")
    client.create_bucket(Bucket=name)

    def key(uri: str) -> str:
        return uri.removeprefix(f"s3://{name}/")

    def names() -> set[str]:
        found = client.list_objects_v2(Bucket=name).get("Contents", [])
        return {f"s3://{name}/{each['Key']}" for each in found}

    return TestedStore(
        f"s3://{name}/deep/er",
        names,
        lambda uri, data: client.put_object(Bucket=name, Key=key(uri), Body=data),
        lambda uri: client.delete_object(Bucket=name, Key=key(uri)),
    )


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> TestedStore:
    if request.param == "file":
        return folder(tmp_path / "store")
    found: TestedStore = request.getfixturevalue("bucket")
    return found


@pytest.fixture
def files(tmp_path: Path) -> TestedStore:
    return folder(tmp_path / "store")


def storing(client: QueueClient, store: TestedStore, **settings: Any) -> Any:
    """The settings of a worker with this store."""
    return worker_config(client.url, client.queue, store_url=store.url, store_over_bytes=OVER, **settings)


def stored_at(client: QueueClient, job_id: str, kind: str) -> str | None:
    """The URI of a job's payload (`in`) or result (`out`); None if Redis has the content itself, or nothing."""
    name = keys.payload(client.queue, job_id) if kind == "in" else keys.outcome(client.queue, job_id)
    found = client.redis.get(name) or b""
    reference = read_payload_stub(found) if kind == "in" else read_result_stub(found)
    return None if reference is None else reference.uri


def deadlines(client: QueueClient) -> dict[str, float]:
    """The files that are scheduled for deletion, and when (unix seconds)."""
    found = client.redis.zrange(f"{keys.prefix(client.queue)}stored", 0, -1, withscores=True)
    return {uri.decode(): at / 1000 for uri, at in found}


def pass_time(client: QueueClient) -> None:
    """Make every scheduled deletion due now."""
    name = f"{keys.prefix(client.queue)}stored"
    for uri in client.redis.zrange(name, 0, -1):
        client.redis.zadd(name, {uri: 1})


def swept(worker: Worker, client: QueueClient) -> None:
    """Wait until the worker has deleted the due files. A claim postpones them for a minute until then."""
    soon = client.redis.time()[0] + 120
    eventually(lambda: all(at > soon for at in deadlines(client).values()), "the sweep")
