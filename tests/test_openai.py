"""OpenAI's client on the queue, without a gateway."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoModel

from pagemill.openai import AsyncOpenAI, OpenAI
from pagemill.producer.gateway import in_process
from tests.engine.pooling.tiny_pooling import ENCODERS, save_base
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, running_worker, worker_config

CHAT: list[Any] = [{"role": "user", "content": "hello there"}]
_TEXT = random.Random(0).randbytes(2000).hex()  # unpredictable: drafts would shorten the job
LONG: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": _TEXT}], "max_tokens": 4000}
"""A job of more than a minute, to be stopped early."""


@pytest.fixture(scope="module")
def queue(valkey_url: str) -> Iterator[str]:
    """A queue with a worker that echoes one token per 20 ms."""
    name = f"q-{uuid.uuid4().hex[:12]}"
    with running_worker(worker_config(valkey_url, name, model="echo:20", max_num_seqs=64)):
        yield name


@pytest.fixture
def client(valkey_url: str, queue: str) -> Iterator[OpenAI]:
    with OpenAI(redis_url=valkey_url, queue=queue, max_retries=0, timeout=PATIENCE_S) as client:
        yield client
    assert "pagemill-gateway" not in {thread.name for thread in threading.enumerate()}


class Watch:
    """Counts the queue's jobs from now on."""

    def __init__(self, url: str, queue: str) -> None:
        self._client = QueueClient(url, queue)
        self._before = self._client.stats().counts

    def wait_for(self, **counts: int) -> None:
        def arrived() -> bool:
            now = self._client.stats().counts
            return all(now.get(s, 0) - self._before.get(s, 0) == count for s, count in counts.items())

        eventually(arrived, f"{counts}")


@pytest.fixture
def watch(valkey_url: str, queue: str) -> Watch:
    return Watch(valkey_url, queue)


def test_one_import_changes(valkey_url: str, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_REDIS_URL", valkey_url)
    with OpenAI(base_url="https://api.example/v1", api_key="sk-1", organization="o", queue=queue) as client:
        assert isinstance(client, openai.OpenAI)
        answer = client.chat.completions.create(model="echo", messages=CHAT, max_tokens=4)
        assert answer.choices[0].message.content == "hell"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert client.completions.create(model="echo", prompt="words", max_tokens=3).choices[0].text == "wor"
        assert client.responses.create(model="echo", input="words").output_text.startswith("words")
        assert [model.id for model in client.with_options(timeout=9).models.list()] == ["echo"]


def test_a_stream_comes_while_its_job_runs_and_ends_it(client: OpenAI, watch: Watch) -> None:
    with client.chat.completions.create(**LONG, stream=True) as stream:
        assert "".join(next(stream).choices[0].delta.content or "" for _ in range(4))
        watch.wait_for(running=1)
    watch.wait_for(running=0, cancelled=1)


def test_a_slow_reader_holds_the_stream_back(
    client: OpenAI, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "_MAX_MESSAGES", 4)
    ask: dict[str, Any] = {"model": "echo", "prompt": "word " * 8, "max_tokens": 40, "stream": True}
    with client.completions.create(**ask) as stream:
        watch.wait_for(running=0, succeeded=1)
        assert "".join(chunk.choices[0].text for chunk in stream) == ask["prompt"]
    with client.chat.completions.create(**LONG, stream=True) as stream:
        next(stream)
    watch.wait_for(running=0, cancelled=1)


def test_errors_are_those_of_openai(client: OpenAI, watch: Watch) -> None:
    with pytest.raises(openai.NotFoundError, match="other") as missing:
        client.chat.completions.create(model="other", messages=CHAT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="echo", messages=CHAT, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**LONG, timeout=0.2)
    watch.wait_for(cancelled=1)
    with pytest.raises(openai.OpenAIError, match="http_client"):
        OpenAI(http_client=openai.DefaultHttpxClient())


def test_without_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PAGEMILL_REDIS_URL", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for kind in (OpenAI, AsyncOpenAI):
        with pytest.raises(openai.OpenAIError, match=r"PAGEMILL_REDIS_URL.*pagemill worker"):
            kind()
        with pytest.raises(openai.OpenAIError, match="port"):
            kind(redis_url="redis://host:0")
    with (
        OpenAI(redis_url="redis://127.0.0.1:1", max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="queue is not reachable"),
    ):
        client.chat.completions.create(model="echo", messages=CHAT)


async def test_asyncio(valkey_url: str, queue: str, watch: Watch) -> None:
    async with AsyncOpenAI(redis_url=valkey_url, queue=queue, timeout=PATIENCE_S) as client:

        async def ask(number: int) -> str:
            stream = await client.completions.create(
                model="echo", prompt=f"number {number:02}", max_tokens=9, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*map(ask, range(40))) == [f"number {n:02}" for n in range(40)]
        waiting = asyncio.create_task(client.chat.completions.create(**LONG))
        await asyncio.to_thread(watch.wait_for, running=1)
        waiting.cancel()
        await asyncio.to_thread(watch.wait_for, cancelled=1)
        stream = await client.chat.completions.create(**LONG, stream=True)
        await anext(stream)
    await asyncio.to_thread(watch.wait_for, running=0, cancelled=2)
    with pytest.raises(openai.APIConnectionError):
        async for _ in stream:
            pass


@pytest.mark.slow
def test_threads_and_event_loops_share_a_client(valkey_url: str, queue: str) -> None:
    client = AsyncOpenAI(redis_url=valkey_url, queue=queue, timeout=PATIENCE_S)

    def ask(number: int) -> str:
        answer = asyncio.run(client.completions.create(model="echo", prompt=str(number), max_tokens=1))
        return answer.choices[0].text

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(8))) == [str(number) for number in range(8)]
    asyncio.run(client.close())
    assert "pagemill-gateway" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_the_end_of_the_process_ends_its_jobs(valkey_url: str, queue: str, watch: Watch) -> None:
    code = f"""
import os, sys
from pagemill.openai import OpenAI
client = OpenAI(redis_url={valkey_url!r}, queue={queue!r})
stream = client.chat.completions.create(**{LONG!r}, stream=True)
print(next(stream).model)
if child := os.fork():
    _, status = os.waitpid(child, 0)
    sys.exit(status)
print(client.completions.create(model="echo", prompt="of a child", max_tokens=10).choices[0].text, flush=True)
"""
    environment = os.environ | {"PYTHONWARNINGS": "ignore::DeprecationWarning"}  # of a fork next to a thread
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.split("\n") == ["echo", "of a child", ""]
    watch.wait_for(running=0, cancelled=1, succeeded=1)


@pytest.mark.slow
def test_real_models(valkey_url: str, queue: str, tmp_path: Path) -> None:
    save_base(tmp_path / "embedder", ENCODERS["bert"], AutoModel)
    configs = [
        worker_config(valkey_url, queue, model=str(tmp_path / "embedder"), num_threads=1),
        worker_config(valkey_url, queue, model="smollm2", kv_cache_memory_bytes=64 << 20, num_threads=1),
    ]
    with (
        running_worker(configs[0]),
        running_worker(configs[1]),
        OpenAI(redis_url=valkey_url, queue=queue, timeout=PATIENCE_S) as client,
    ):
        vectors = client.embeddings.create(model="embedder", input=["some", "words"]).data
        assert len(vectors[0].embedding) == len(vectors[1].embedding) > 1
        ask: dict[str, Any] = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0.0}
        whole = client.completions.create(**ask, max_tokens=8).choices[0].text
        assert "Paris" in whole
        assert (
            "".join(c.choices[0].text for c in client.completions.create(**ask, max_tokens=8, stream=True))
            == whole
        )
