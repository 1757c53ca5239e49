"""Zero, some, then zero workers: an autoscaler that uses only the exporter's metrics, as KEDA does on Kubernetes."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pagemill.worker.status.queue_exporter import QueueExporter, QueueSet
from tests.chaos import invariants
from tests.conftest import ROOT
from tests.monitoring.prometheus_server import PrometheusServer, program
from tests.worker.harness import QueueClient, WorkerProcess, eventually, get, process_settings

pytestmark = pytest.mark.slow

SCALED_OBJECT = ROOT / "deploy/kubernetes/components/autoscaling/scaledobject.yaml"

Figures = Callable[[], dict[str, float | None]]
"""The value of each trigger; None: no value exists now."""


def spec() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(SCALED_OBJECT.read_text())["spec"]
    return made


@pytest.fixture
def exporter(client: QueueClient) -> Iterator[QueueExporter]:
    exporter = QueueExporter(QueueSet(client.url, [client.queue]), "127.0.0.1", 0)
    yield exporter
    exporter.close()


@pytest.fixture(params=[pytest.param("exporter", marks=pytest.mark.slow), "prometheus"])
def figures(
    request: pytest.FixtureRequest, client: QueueClient, exporter: QueueExporter, tmp_path: Path
) -> Iterator[Figures]:
    """The values of the triggers' queries: added up here, or by a Prometheus that runs them unchanged."""
    if request.param == "exporter":
        yield lambda: added_up(exporter.url)
        return
    program("prometheus")
    server = PrometheusServer(tmp_path / "prometheus", {"exporter": [exporter.url.removeprefix("http://")]})
    server.start()
    queries = {
        trigger["name"]: trigger["metadata"]["query"].replace('"default"', f'"{client.queue}"')
        for trigger in spec()["triggers"]
    }
    yield lambda: {name: next(iter(server.numbers(query)), None) for name, query in queries.items()}
    server.stop()


def added_up(url: str) -> dict[str, float | None]:
    samples = [
        sample
        for family in text_string_to_metric_families(get(f"{url}/metrics")[1].decode())
        for sample in family.samples
    ]
    held = [
        s.value
        for s in samples
        if s.name == "pagemill_queue_jobs" and s.labels["state"] in ("waiting", "running")
    ]
    ages = [s.value for s in samples if s.name == "pagemill_queue_oldest_job_age_seconds"]
    return {"depth": sum(held) if held else None, "oldest-age": max(ages, default=0.0 if held else None)}


def wanted_workers(figures: Figures) -> int | None:
    """The replicas that KEDA would run; None while a metric is missing, which is an error in KEDA."""
    scaled, values = spec(), figures()
    wanted = 0
    for trigger in scaled["triggers"]:
        value = values[trigger["name"]]
        if value is None:
            return None
        if value > float(trigger["metadata"]["activationThreshold"]):
            wanted = max(wanted, math.ceil(value / float(trigger["metadata"]["threshold"])))
    return min(max(wanted, scaled["minReplicaCount"]), scaled["maxReplicaCount"])


def test_workers_come_from_zero_and_go_back_to_it(
    figures: Figures, client: QueueClient, tmp_path: Path
) -> None:
    def start(**settings: Any) -> WorkerProcess:
        given = process_settings(client.url, client.queue, **settings)
        return WorkerProcess(given, tmp_path / f"worker-{len(list(tmp_path.glob('worker-*')))}.log")

    # A queue without jobs and without models is known, and empty.
    eventually(lambda: wanted_workers(figures) == 0, "an empty queue to want no worker")

    texts = [f"{i:03d} " * 3 for i in range(100)]
    ids = client.submit(*({"prompt": text, "max_tokens": len(text)} for text in texts), batch_id="all")
    eventually(lambda: (wanted_workers(figures) or 0) >= 2, "100 jobs to want two workers")
    assert client.counts("all").queued == 100, "they wait for a worker"
    worker = start(model="echo:1")
    client.wait(ids)
    eventually(lambda: wanted_workers(figures) == 0, "nothing to be left")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log()
    assert client.workers() == []

    # Long jobs, whose worker is removed in the middle: a drain, not a loss.
    long = [f"{i:03d} " * 60 for i in range(4)]
    ids += client.submit(*({"prompt": text, "max_tokens": len(text)} for text in long), batch_id="all")
    eventually(lambda: (wanted_workers(figures) or 0) >= 1, "a worker to be wanted again")
    worker = start(model="echo:20", drain_grace_s=0.0)
    eventually(lambda: all(client.generated(job_id) for job_id in ids[-4:]), "all of them to run")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log()
    assert client.counts("all").running == 0
    eventually(lambda: (wanted_workers(figures) or 0) >= 1, "what was requeued to want a worker")
    worker = start(model="echo:1")
    outcomes = invariants.check(client, ids)
    invariants.check_echoes(outcomes, texts + long)
    assert any(outcome.result and outcome.result.resumed_tokens for outcome in outcomes[-4:])
    eventually(lambda: wanted_workers(figures) == 0, "nothing to be left")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.log()
