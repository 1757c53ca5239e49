"""Models from a hub on loopback, under several names: real worker processes, a real Valkey, the gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from pagemill.engine.llm import LLM
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.tiny_model import VOCAB_SIZE, save_tiny_llama
from tests.hub_server import LoopbackHub, Repository, files_in, running_hub
from tests.producer.gateway.serving import gateway
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, get

pytestmark = pytest.mark.slow

PROMPT = "w5 w9 w11"
GENERATE = """
import json, sys
from pagemill import LLM, SamplingParams

llm = LLM(model=sys.argv[1], num_kv_blocks=16)
(output,) = llm.generate(sys.argv[2], SamplingParams(max_tokens=8, temperature=0))
print(json.dumps([llm.engine.served_models, llm.engine.fingerprint, output.outputs[0].text]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads words w0, w1, ..."""
    directory = tmp_path_factory.mktemp("published")
    save_tiny_llama(directory)
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[LoopbackHub]:
    with running_hub() as hub:
        hub.add("org/tiny", files_in(folder))
        hub.add("org/vision", {"config.json": b'{"model_type": "resnet"}', "model.safetensors": b"w" * 1000})
        yield hub


@pytest.fixture(scope="module")
def repository(hub: LoopbackHub) -> Repository:
    return hub.repositories["org/tiny"]


@pytest.fixture(scope="module")
def environment(hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = str(tmp_path_factory.mktemp("home"))
    return os.environ | {
        "HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"
    }  # fmt: skip


def generate(model: str, environment: dict[str, str]) -> tuple[list[str], str, str]:
    command = [sys.executable, "-c", GENERATE, model, PROMPT]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    names, fingerprint, text = json.loads(ran.stdout)
    return names, fingerprint, text


def worker_command(client: QueueClient, *words: str) -> list[str]:
    common = ["--redis-url", client.url, "--queue", client.queue, "--http-port", "0", "--num-kv-blocks", "64"]
    return [sys.executable, "-m", "pagemill", "worker", *common, *words]


def test_a_hubs_model_and_a_copy_of_it_are_one(
    folder: Path, repository: Repository, environment: dict[str, str]
) -> None:
    repository.tags["v1"] = repository.commit
    llm = LLM(str(folder), num_kv_blocks=16)
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=8, temperature=0))
    names, fingerprint, text = generate("org/tiny@v1", environment)
    assert text == output.outputs[0].text
    assert text.split()
    assert names == ["org/tiny"]
    assert fingerprint == f"{llm.engine.fingerprint}@{repository.commit[:12]}"
    assert llm.engine.served_models == (folder.name,)


def test_jobs_for_every_name_are_answered(
    client: QueueClient, repository: Repository, environment: dict[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    command = worker_command(
        client, "--model", "org/tiny", "--served-model-name", "main/name", "alias", "--device", "cpu"
    )
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        eventually(
            lambda: any(info.models for info in client.workers()) or process.poll() is not None, "a worker"
        )
        (info,) = client.workers()
        assert info.models == ("main/name", "alias"), log.read_text()
        assert 'model="main/name"' in get(f"{info.url}/metrics")[1].decode()
        given = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        ids = client.submit(*(given | {"model": name} for name in info.models))
        results = client.results(ids)
        texts = {result.text for result in results}
        assert len(texts) == 1
        assert all(result and result.fingerprint.endswith(f"@{repository.commit[:12]}") for result in results)
        with (
            gateway(client.url, client.queue) as served,
            OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as openai,
        ):
            assert {model.id for model in openai.models.list()} == {"main/name", "alias"}
            assert openai.models.retrieve("main/name").id == "main/name"
            answer = openai.completions.create(model="main/name", prompt=PROMPT, max_tokens=8, temperature=0)
            assert answer.choices[0].text in texts
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    told = log.read_text()
    assert f"model: org/tiny, commit {repository.commit}, in " in told
    assert "ready: model main/name, alias" in told
    assert "HTTP Request" not in told


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("org/none", "no model org/none that you can read"),
        ("org/vision", "model type 'resnet' is not supported"),
    ],
)
def test_a_start_that_fails_pulls_no_job(
    model: str, reason: str, client: QueueClient, hub: LoopbackHub, environment: dict[str, str]
) -> None:
    (job_id,) = client.submit({"prompt": PROMPT, "model": model})
    ran = subprocess.run(
        worker_command(client, "--model", model), env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 2, ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if "error" in line.lower()]
    assert reason in line
    assert "Traceback" not in ran.stderr
    assert client.status(job_id).state == "queued"
    assert not [asked for asked in hub.downloads("model.safetensors") if model in asked.path]
