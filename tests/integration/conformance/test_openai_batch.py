"""openai-batch: a batch with lines for chats is submitted, waited for and downloaded, errors beside answers."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.integration.conformance.environments import outside, python_with
from tests.producer.gateway.serving import gateway
from tests.worker.harness import running_worker, worker_config

PACKAGES = ("openai-batch==0.3.4", "openai<3")
"""It imports httpx, which openai 3 does not bring."""
NUM_LINES = 12
SCRIPT = """
import sys
from openai_batch import Batch
from openai_batch.providers import Provider

provider = Provider(name="pagemill", base_url=sys.argv[1], api_key="none")
with Batch("input.jsonl", "output.jsonl", "errors.jsonl", provider=provider) as batch:
    batch.submit_wait_download(interval=0.2)
"""


def line(number: int) -> str:
    """A request; the first one is refused."""
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
