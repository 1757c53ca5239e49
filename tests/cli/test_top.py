"""`pagemill top` against a worker and a queue."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner, Result

from pagemill.__main__ import app
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

NOBODY = "redis://127.0.0.1:1/0"


def top(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["top", *arguments])


@pytest.mark.slow
def test_one_look_finds_the_worker_through_the_queue(client: QueueClient, valkey_url: str) -> None:
    (job_id,) = client.submit({"prompt": "x" * 900, "max_tokens": 900})
    where = ("--redis-url", valkey_url, "--queue", client.queue)
    with running_worker(worker_config(valkey_url, client.queue, model="echo:20")):
        eventually(lambda: client.generated(job_id) and _is_ready(client), "the job to run")
        shown = top("--once", *where)
        document = json.loads(top("--json", *where).stdout)
    assert shown.exit_code == 0, shown.output
    for part in ("echo", "ready", "KV in use", "decode", job_id[:12], "KV blocks"):
        assert part in shown.stdout, part
    assert document["live"]["jobs"]["shown"][0]["id"] == job_id
    assert document["live"]["blocks"]["runs"]
    assert document["queue"]["running"] == 1


@pytest.mark.slow
def test_a_worker_s_address_is_enough(client: QueueClient, valkey_url: str) -> None:
    with running_worker(worker_config(valkey_url, client.queue)) as worker:
        shown = top("--once", "--url", str(worker.http_url), "--redis-url", NOBODY)
    assert shown.exit_code == 0
    assert worker.worker_id in shown.stdout
    assert "Redis does not answer" in shown.stdout


def test_the_queue_alone_is_shown_where_no_worker_lives(client: QueueClient, valkey_url: str) -> None:
    client.submit({"prompt": "a"})
    client.run(registry.heartbeat(client.queue, WorkerInfo(id="w1", models=("m",), url="http://127.0.0.1:1")))
    shown = top("--once", "--redis-url", valkey_url, "--queue", client.queue)
    assert shown.exit_code == 0
    assert "1 waiting" in shown.stdout
    assert "http://127.0.0.1:1" in shown.stdout
    unknown = top("--once", "--worker", "nobody", "--redis-url", valkey_url, "--queue", client.queue)
    assert "no live worker nobody" in unknown.stdout


def test_nothing_at_all_is_exit_code_3() -> None:
    for option in ("--once", "--json"):
        assert top(option, "--redis-url", NOBODY).exit_code == 3


@pytest.mark.slow
def test_it_draws_on_a_terminal_until_ctrl_c(client: QueueClient, valkey_url: str) -> None:
    with running_worker(worker_config(valkey_url, client.queue)):
        eventually(lambda: _is_ready(client), "the worker")
        leader, follower = pty.openpty()
        command = [
            sys.executable, "-m", "pagemill", "top", "--redis-url", valkey_url, "--queue", client.queue,
        ]  # fmt: skip
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        process = subprocess.Popen(
            [*command, "--every", "0.2"], stdout=follower, stderr=follower, env=environment
        )
        os.close(follower)
        try:
            drawn, give_up = b"", time.monotonic() + PATIENCE_S
            while drawn.count(b"KV blocks") < 2:
                assert time.monotonic() < give_up, drawn[-500:]
                if select.select([leader], [], [], 0.5)[0]:
                    drawn += os.read(leader, 65536)
            assert b"\x1b[" in drawn
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # the other end closes when it exits
                while select.select([leader], [], [], PATIENCE_S)[0]:
                    os.read(leader, 65536)
            process.wait(PATIENCE_S)
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait()
            os.close(leader)


def _is_ready(client: QueueClient) -> bool:
    return any(info.state == "ready" for info in client.workers())
