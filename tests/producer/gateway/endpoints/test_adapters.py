"""Adapters as models of the openai package: the real smollm2, two adapters and no adapter in one batch."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from transformers import AutoTokenizer

from benchmarks.dense import dense_smollm2
from pagemill.worker.worker import Worker
from tests.engine.adapters.trained import Trained, merged_tokens, save_adapter
from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
NUM_TOKENS = 8
NAMES = ("smollm2", "red", "blue")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, model = tmp_path_factory.mktemp("adapters"), dense_smollm2()
    return {
        name: save_adapter(model, root / name, Trained(rank=8, seed=seed, std=0.3))
        for seed, name in enumerate(NAMES[1:])
    }


@pytest.fixture(scope="module")
def queue() -> str:
    return f"q-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="module")
def worker(valkey_url: str, queue: str, adapters: dict[str, Path]) -> Iterator[Worker]:
    config = worker_config(
        valkey_url,
        queue,
        model="smollm2",
        num_kv_blocks=256,
        adapters=tuple(f"{name}={path}" for name, path in adapters.items()),
    )
    with running_worker(config, load_patience_s=400) as worker:
        yield worker


@pytest.fixture(scope="module")
def served(valkey_url: str, queue: str, worker: Worker) -> Iterator[Served]:
    with gateway(valkey_url, queue) as served:
        yield served


def test_three_models_in_one_batch(
    valkey_url: str, queue: str, client: OpenAI, worker: Worker, adapters: dict[str, Path]
) -> None:
    eventually(lambda: {model.id for model in client.models.list()} == set(NAMES), "adapters are listed")
    directory = dense_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer(PROMPT).input_ids
    wanted = {
        name: tokenizer.decode(merged_tokens(directory, adapters.get(name), [prompt], NUM_TOKENS)[0])
        for name in NAMES
    }
    steps = worker.engine.stats.steps.finished if worker.engine.stats else 0

    def ask(name: str) -> tuple[str, str]:
        answer = client.completions.create(
            model=name, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
        return answer.model, answer.choices[0].text

    waiting = QueueClient(valkey_url, queue)
    waiting.pause()  # all of them wait, and start together
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, name) for name in NAMES]
        eventually(lambda: sum(waiting.stats().waiting.values()) == 3, "three jobs that wait")
        waiting.pause(False)
        found = dict(one.result(PATIENCE_S) for one in asked)
    waiting.redis.close()
    assert found == wanted
    assert len(set(wanted.values())) == 3
    stats = worker.engine.stats
    assert stats is not None
    assert stats.steps.finished - steps < 2 * NUM_TOKENS, "the three did not share their steps"


def test_streams_and_unknown_names(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="blue", messages=[{"role": "user", "content": "hello"}], max_tokens=4, stream=True
        )
    )
    assert {chunk.model for chunk in chunks} == {"blue"}
    assert client.models.retrieve("red").id == "red"
    with pytest.raises(openai.NotFoundError, match="'green' does not exist"):
        client.completions.create(model="green", prompt="x")
    with pytest.raises(openai.NotFoundError, match="'red' does not exist"):
        client.embeddings.create(model="red", input="x")


def test_keys_name_adapters_as_they_name_models(
    valkey_url: str, queue: str, worker: Worker, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.json", one={"models": ["red"]})
    with (
        gateway(valkey_url, queue, keys_path=tmp_path / "keys.json") as served,
        OpenAI(base_url=served.base_url, api_key=keys["one"], max_retries=0, timeout=PATIENCE_S) as client,
    ):
        assert [model.id for model in client.models.list()] == ["red"]
        assert client.completions.create(model="red", prompt="x", max_tokens=2).model == "red"
        begun = client.responses.create(model="red", input="x", max_output_tokens=2, background=True)
        assert client.responses.retrieve(begun.id).model == "red"
        with pytest.raises(openai.PermissionDeniedError):
            client.completions.create(model="blue", prompt="x")


def test_a_batch_file(client: OpenAI) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body | {"model": name}}
        for name in NAMES
    ]
    file = client.files.create(file=io.BytesIO("\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    done = eventually(
        lambda: (found := client.batches.retrieve(batch.id)).status == "completed" and found,
        "the batch's end",
    )
    rows = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    direct = {
        name: client.completions.create(model=name, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0)
        for name in NAMES
    }
    assert found == {name: answer.choices[0].text for name, answer in direct.items()}
