"""autobatcher gets every answer, though the worker and the gateway are killed while its requests run."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from tests.integration.conformance.environments import outside, python_with
from tests.producer.gateway.serving import gateway_process
from tests.worker.harness import QueueClient, WorkerProcess, eventually, process_settings

PACKAGES = ("autobatcher==0.12.0",)
SCRIPT = Path(__file__).with_name("script_autobatcher.py")
PROMPTS = [random.Random(number).randbytes(100).hex() for number in range(12)]
"""Unpredictable, so that drafts do not shorten the jobs, which take a few seconds."""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["responses", "batches"])
def test_autobatcher_survives_kills(
    way: str, valkey_url: str, queue_name: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    python = python_with(pytestconfig, *PACKAGES)
    queue = QueueClient(valkey_url, queue_name)
    settings = process_settings(valkey_url, queue_name, model="echo:30")
    worker = WorkerProcess(settings, tmp_path / "worker-1.log")
    log = tmp_path / "client.log"
    try:
        with gateway_process(valkey_url, queue_name) as (served, process):
            served.wait_for("echo")
            environment = outside() | {"GATEWAY_URL": served.base_url}
            environment |= {"COMPLETION_WINDOW": "24h"} if way == "batches" else {}
            with log.open("w") as errors:
                client = subprocess.Popen(
                    [python, SCRIPT], env=environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                )  # fmt: skip
            assert client.stdin is not None
            client.stdin.write(json.dumps(PROMPTS))
            client.stdin.close()
            client.stdin = None
            eventually(lambda: queue.stats().counts.get("running") == len(PROMPTS), "all jobs to run")
            worker.kill()
            process.kill()
        assert client.poll() is None
        worker = WorkerProcess(settings, tmp_path / "worker-2.log")
        with gateway_process(valkey_url, queue_name, port=served.port):
            answers, _ = client.communicate(timeout=300)
    finally:
        worker.kill()
    assert client.returncode == 0, log.read_text()
    assert json.loads(answers) == PROMPTS
    assert queue.stats().counts["succeeded"] == len(PROMPTS)
