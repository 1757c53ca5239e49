"""The cases of docs/conformance, checked for the Python producer and for the TypeScript client."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis

from pagemill import Producer
from tests.conftest import ROOT
from tests.integration.test_redis_deployments import documented_users
from tests.producer.conformance import Recorder, play
from tests.worker.harness import running_worker, worker_config

CASES = sorted((ROOT / "docs/conformance").glob("*.json"))


@pytest.fixture
def workers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_python_producer(
    path: Path, valkey_url: str, queue_name: str, workers: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    case: dict[str, Any] = json.loads(path.read_text())
    recorder = Recorder()
    recorder.install(monkeypatch)
    with Producer(valkey_url, queue=queue_name) as producer:
        play(
            producer,
            case,
            recorder,
            lambda: workers.enter_context(running_worker(worker_config(valkey_url, queue_name))) and None,
        )


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_client_for_node(
    path: Path, node_client: Path, valkey_url: str, queue_name: str, workers: ExitStack
) -> None:
    with redis.Redis.from_url(valkey_url) as admin:
        admin.execute_command(
            "ACL", "SETUSER", "producer", *documented_users(queue_name)["producer"], ">word"
        )
    url = valkey_url.replace("redis://", "redis://producer:word@")
    command = ["node", node_client / "test/conformance.mjs", url, queue_name, path]
    with subprocess.Popen(
        [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as player:
        assert player.stdin is not None
        assert player.stdout is not None
        assert player.stderr is not None
        said = player.stdout.readline().strip()
        if said == "worker":
            workers.enter_context(running_worker(worker_config(valkey_url, queue_name)))
            player.stdin.write("\n")
            player.stdin.flush()
            said = player.stdout.readline().strip()
        assert said == "passed", player.stderr.read()


def test_every_case_is_told_apart_from_a_wrong_one() -> None:
    """The comparison itself: a pattern that matches everything would check nothing."""
    from tests.producer.conformance import fits

    assert fits({"json": {"a": 1}}, '{"a": 1}')
    assert not fits({"json": {"a": 1}}, '{"a": 1, "b": 2}')
    assert not fits({"match": "[0-9]+"}, "12x")
    assert not fits([1, 2], [1])
    assert fits([1, "..."], [1, 2])
    assert not fits({"any": "number"}, "1")
