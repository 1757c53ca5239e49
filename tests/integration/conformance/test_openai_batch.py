"""openai-batch: a batch of chats is submitted, awaited and downloaded, with errors next to answers.

During another batch, the worker and the gateway are killed.
"""

from __future__ import annotations

import json
import random
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.integration.conformance.environments import outside, python_with
from tests.producer.gateway.serving import gateway, gateway_process
from tests.worker.harness import (
    QueueClient,
    WorkerProcess,
    eventually,
    process_settings,
    running_worker,
    worker_config,
)

PACKAGES = ("openai-batch==0.3.4", "openai<3")
"""It imports httpx, which openai 3 does not install."""
NUM_LINES = 12
HEAD = """
import sys, time
from openai import APIConnectionError
from openai_batch import Batch
from openai_batch.providers import Provider

provider = Provider(name="pagemill", base_url=sys.argv[1], api_key="none")
with Batch("input.jsonl", "output.jsonl", "errors.jsonl", provider=provider) as batch:
"""
SCRIPT = f"""{HEAD}
    batch.submit_wait_download(interval=0.2)
"""
PATIENT_SCRIPT = f"""{HEAD}
    batch.submit()
    finished = None
    while finished is None:
        time.sleep(0.2)
        try:
            finished = batch.status().completed_at
        except APIConnectionError:
            pass
    batch.download()
"""
"""Its own wait ends after two failed polls, within two seconds."""
PROMPTS = [random.Random(number).randbytes(100).hex() for number in range(NUM_LINES)]
"""Unpredictable, so that drafts do not shorten the jobs, which take a few seconds."""


def line(number: int) -> str:
    """A request; the first one is rejected."""
    body = {"model": "echo", "messages": [{"role": "user", "content": f"line {number}"}]}
    body |= {"max_tokens": 4 if number else -1}
    return json.dumps(
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
    )


@pytest.mark.slow
def test_a_batch_is_submitted_waited_for_and_downloaded(
    valkey_url: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    python = python_with(pytestconfig, *PACKAGES)
    queue = f"q-{uuid.uuid4().hex[:12]}"
    with running_worker(worker_config(valkey_url, queue, model="echo")), gateway(valkey_url, queue) as served:
        served.wait_for("echo")
        (tmp_path / "input.jsonl").write_text("\n".join(map(line, range(NUM_LINES))))
        subprocess.run(
            [python, "-c", SCRIPT, served.base_url],
            env=outside(), cwd=tmp_path, check=True, timeout=120,
        )  # fmt: skip
    answers, errors = (
        {
            line["custom_id"]: line["response"]
            for line in map(json.loads, (tmp_path / name).read_text().splitlines())
        }
        for name in ("output.jsonl", "errors.jsonl")
    )
    assert len(answers) == NUM_LINES - 1
    assert all(answer["body"]["choices"][0]["message"]["content"] for answer in answers.values())
    ((_, refused),) = errors.items()
    assert refused["status_code"] == 400
    assert "max_tokens" in refused["body"]["error"]["message"]


@pytest.mark.slow
def test_a_batch_survives_kills(
    valkey_url: str, queue_name: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    python = python_with(pytestconfig, *PACKAGES)
    queue = QueueClient(valkey_url, queue_name)
    settings = process_settings(valkey_url, queue_name, model="echo:30")
    worker = WorkerProcess(settings, tmp_path / "worker-1.log")
    lines = [json.loads(line(1)) | {"custom_id": str(number)} for number in range(NUM_LINES)]
    for each, prompt in zip(lines, PROMPTS, strict=True):
        each["body"] |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": len(prompt)}
    (tmp_path / "input.jsonl").write_text("\n".join(map(json.dumps, lines)))
    try:
        with gateway_process(valkey_url, queue_name) as (served, process):
            served.wait_for("echo")
            command = [python, "-c", PATIENT_SCRIPT, served.base_url]
            client = subprocess.Popen(command, env=outside(), cwd=tmp_path)
            eventually(lambda: queue.stats().counts.get("running") == NUM_LINES, "all jobs to run")
            worker.kill()
            process.kill()
        worker = WorkerProcess(settings, tmp_path / "worker-2.log")
        with gateway_process(valkey_url, queue_name, port=served.port):
            assert client.wait(timeout=300) == 0
    finally:
        worker.kill()
    answers = [json.loads(line) for line in (tmp_path / "output.jsonl").read_text().splitlines()]
    assert len(answers) == NUM_LINES
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in answers}
    assert texts == {str(number): prompt for number, prompt in enumerate(PROMPTS)}
    assert queue.stats().counts["succeeded"] == NUM_LINES
