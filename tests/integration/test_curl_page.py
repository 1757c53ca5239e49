"""docs/curl.md: every command gets a successful response from a gateway."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.producer.gateway.serving import gateway
from tests.worker.harness import eventually, running_worker, worker_config

PAGE = (ROOT / "docs" / "curl.md").read_text(encoding="utf-8")
STATUS = "curl -s http://127.0.0.1:8000/v1/batches/BATCH"


@pytest.mark.slow
def test_the_commands(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    config = worker_config(valkey_url, queue_name, model="echo", served_model_name=("smollm2",))
    (line,) = re.findall(r"^\{\"custom_id\".+$", PAGE, re.MULTILINE)
    (tmp_path / "requests.jsonl").write_text(f"{line}\n")
    with running_worker(config), gateway(valkey_url, queue_name) as served:
        served.wait_for("smollm2")
        ids: dict[str, str] = {}

        def call(command: str) -> str:
            text = command.replace("http://127.0.0.1:8000", served.url)
            for word, value in ids.items():
                text = text.replace(word, value)
            done = subprocess.run(
                ["curl", "--fail-with-body", *shlex.split(text)[1:]],
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            return done.stdout

        def has_output(batch: dict[str, str | None]) -> bool:
            ids["OUTPUT"] = batch["output_file_id"] or ""
            return bool(ids["OUTPUT"])

        answers = []
        for command in re.findall(r"^curl .+$", PAGE, re.MULTILINE):
            if "OUTPUT" in command:
                eventually(lambda: has_output(json.loads(call(STATUS))), "the batch")
            answers.append(call(command))
            if "-F purpose" in command:
                ids["FILE"] = json.loads(answers[-1])["id"]
            elif "input_file_id" in command:
                ids["BATCH"] = json.loads(answers[-1])["id"]
        assert len(answers) >= 10
        assert "data: [DONE]" in answers[1]
        assert set(json.loads(answers[2])["choices"][0]["label_probs"]) == {" good", " bad"}
        assert any('"custom_id":"row-1"' in answer.replace(" ", "") for answer in answers)
