"""The cases of docs/conformance, held by the Python producer and by the client for Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from tests.conftest import ROOT
from tests.producer.conformance import Recorder, play
from tests.worker.harness import running_worker, worker_config

CASES = sorted((ROOT / "docs/conformance").glob("*.json"))
NODE = ROOT / "examples/node"
MOST_LINES = 200


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


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example with its dependency."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node")
    directory = tmp_path_factory.mktemp("node") / "example"
    shutil.copytree(NODE, directory, ignore=shutil.ignore_patterns("node_modules"))
    install = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error"]
    run = subprocess.run(install, cwd=directory, capture_output=True, text=True, check=False, timeout=300)
    if run.returncode:
        pytest.skip(f"npm can't install the example's dependency: {run.stderr[-300:]}")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_client_for_node(
    path: Path, node: Path, valkey_url: str, queue_name: str, workers: ExitStack
) -> None:
    scripts = ROOT / "producer/wire/lua"
    command = ["node", node / "conformance.mjs", valkey_url, queue_name, scripts, path]
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


def test_the_client_for_node_is_short() -> None:
    assert len((NODE / "pagemill.mjs").read_text().splitlines()) < MOST_LINES


def test_every_case_is_told_apart_from_a_wrong_one() -> None:
    """The comparison itself: a pattern that anything fits would hold nobody."""
    from tests.producer.conformance import fits

    assert fits({"json": {"a": 1}}, '{"a": 1}')
    assert not fits({"json": {"a": 1}}, '{"a": 1, "b": 2}')
    assert not fits({"match": "[0-9]+"}, "12x")
    assert not fits([1, 2], [1])
    assert fits([1, "..."], [1, 2])
    assert not fits({"any": "number"}, "1")
