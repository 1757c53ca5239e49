"""`pagemill exporter`: the metrics that it exports to Prometheus without any worker."""

from __future__ import annotations

import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagemill.producer.wire.calls import registry, transitions
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.worker.status.queue_exporter import QueueExporter, QueueSet, discover
from tests.conftest import RedisServer
from tests.worker.harness import (
    PATIENCE_S,
    QueueClient,
    eventually,
    get,
    get_json,
    running_worker,
    worker_config,
)

Sample = tuple[str, tuple[tuple[str, str], ...]]


def scrape(url: str) -> dict[Sample, float]:
    status, body = get(f"{url}/metrics")
    assert status == 200
    families = text_string_to_metric_families(body.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(samples: dict[Sample, float], name: str, **labels: str) -> float | None:
    return samples.get((f"pagemill_{name}", tuple(sorted(labels.items()))))


@contextmanager
def exporting(url: str, *names: str, **options: float) -> Iterator[str]:
    exporter = QueueExporter(QueueSet(url, names, **options), "127.0.0.1", 0)
    try:
        yield exporter.url
    finally:
        exporter.close()


@pytest.fixture
def second(valkey_url: str) -> Iterator[QueueClient]:
    with QueueClient(valkey_url, f"q-{uuid.uuid4().hex[:12]}") as client:
        yield client


def test_a_queue_without_a_worker_has_its_depth_and_no_server_for_its_model(client: QueueClient) -> None:
    client.submit({"prompt": "a", "priority": "high"}, {"prompt": "b"}, {"prompt": "c", "delay": 600})
    with exporting(client.url, client.queue) as url:
        samples = scrape(url)
    queue = client.queue
    assert value(samples, "queue_waiting_jobs", queue=queue, model="echo", priority="high") == 1
    assert value(samples, "queue_waiting_jobs", queue=queue, model="echo", priority="normal") == 1
    assert value(samples, "queue_jobs", queue=queue, state="delayed") == 1
    assert value(samples, "queue_workers", queue=queue, state="ready") == 0
    assert value(samples, "queue_serving_workers", queue=queue, model="echo") == 0
    assert value(samples, "redis_up") == 1


def test_it_says_what_a_worker_s_own_scrape_says(client: QueueClient, valkey_url: str) -> None:
    """Dashboards use the maximum of both."""
    client.pause()
    client.submit(*({"prompt": "a"} for _ in range(5)))
    with (
        running_worker(worker_config(valkey_url, client.queue)) as worker,
        exporting(valkey_url, client.queue) as url,
    ):
        eventually(
            lambda: any(info.state == "ready" for info in client.workers()),
            "the worker to say that it is ready",
        )
        own, others = scrape(str(worker.http_url)), scrape(url)
    clocks = (
        "queue_scrape_timestamp",
        "queue_oldest_job_age",
        "queue_estimated_drain",
        "redis_",
        "scrape_source",
        "queue_memory_bytes",  # an estimate from a random sample
    )
    compared = {
        sample
        for sample in own
        if sample[0].startswith("pagemill_queue_") and not any(c in sample[0] for c in clocks)
    }
    assert len(compared) > 10
    assert {sample: own[sample] for sample in compared} == {sample: others.get(sample) for sample in compared}


@pytest.mark.slow
def test_all_queues_are_found_and_none_besides(client: QueueClient, second: QueueClient) -> None:
    client.submit({"prompt": "a"})
    second.run(registry.heartbeat(second.queue, WorkerInfo(id="w1", models=("m",))))
    client.redis.set(f"pagemill:{{{client.queue}-x}}:cousins", "no queue's")
    found = discover(client.url)
    assert {client.queue, second.queue} <= set(found)
    assert f"{client.queue}-x" not in found
    with exporting(client.url) as url:
        samples = scrape(url)
    assert value(samples, "queue_jobs", queue=client.queue, state="waiting") == 1
    assert value(samples, "queue_workers", queue=second.queue, state="ready") == 1


@pytest.mark.slow
def test_a_queue_that_comes_later_is_found(client: QueueClient, valkey_url: str) -> None:
    with exporting(valkey_url, discover_every_s=0.1) as url:
        assert value(scrape(url), "queue_jobs", queue=client.queue, state="waiting") is None
        client.submit({"prompt": "a"})
        eventually(
            lambda: value(scrape(url), "queue_jobs", queue=client.queue, state="waiting") == 1,
            "the new queue",
        )


def test_redis_away_is_told_and_gets_over(own_valkey: RedisServer, queue_name: str) -> None:
    client = QueueClient(own_valkey.url, queue_name)
    client.submit({"prompt": "a"})
    with exporting(own_valkey.url, queue_name) as url:
        assert get_json(f"{url}/readyz")[0] == 200
        own_valkey.kill()
        samples = scrape(url)
        assert value(samples, "redis_up") == 0
        assert value(samples, "scrape_source_errors_total", source="queue") == 1
        assert value(samples, "queue_jobs", queue=queue_name, state="waiting") is None, "unknown is not 0"
        assert (get_json(f"{url}/readyz")[0], get_json(f"{url}/healthz")[0]) == (503, 200)
        own_valkey.start()
        assert value(scrape(url), "queue_jobs", queue=queue_name, state="waiting") == 1
    client.redis.close()


@pytest.mark.slow
def test_the_command_runs_without_torch_and_ends_at_sigterm(client: QueueClient, valkey_url: str) -> None:
    client.submit({"prompt": "a"})
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pagemill.__main__ import main\nmain()"
    )
    command = [sys.executable, "-c", program, "exporter", "--queue", client.queue, "--redis-url", valkey_url]
    process = subprocess.Popen([*command, "--http-port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(
            line.split(" at ")[1].split("/metrics")[0] for line in lines if "queue metrics at" in line
        )
        assert value(scrape(address), "queue_jobs", queue=client.queue, state="waiting") == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_read_makes_due_what_no_worker_is_there_to_make_due(client: QueueClient, valkey_url: str) -> None:
    """Scaling from zero counts waiting jobs: also one whose delay is over and one that lost its worker."""
    client.submit({"prompt": "a"})
    assert len(client.run(transitions.pull(client.queue, "gone", ["echo"], 1, 10**9, 1)).jobs) == 1
    client.submit({"prompt": "b", "delay": 0.05})

    with exporting(valkey_url, client.queue, lease_patience_ms=50) as url:

        def waiting() -> float | None:
            return value(scrape(url), "queue_jobs", queue=client.queue, state="waiting")

        eventually(lambda: waiting() == 2, "both jobs to wait for a worker")
        samples = scrape(url)
    assert value(samples, "queue_jobs", queue=client.queue, state="delayed") == 0
    assert value(samples, "queue_jobs", queue=client.queue, state="running") == 0


def test_an_exporter_that_may_only_read_still_reads(client: QueueClient, own_valkey: RedisServer) -> None:
    queue = QueueClient(own_valkey.url, client.queue)
    queue.submit({"prompt": "a"}, {"prompt": "b", "delay": 600})
    queue.redis.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~*", "&*", "+@all", "-@write")
    url = own_valkey.url.replace("redis://", "redis://reader:word@")
    with exporting(url, client.queue) as exported:
        for _ in range(2):
            samples = scrape(exported)
            assert value(samples, "redis_up") == 1
            assert value(samples, "queue_jobs", queue=client.queue, state="waiting") == 1
    queue.redis.close()
