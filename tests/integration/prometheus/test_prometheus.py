"""A real Prometheus scrapes a worker under load, an exporter and a gateway.

Every query of every dashboard and alert runs on the scraped data. A table lists the queries without data
here, with the reason, and the table is checked both ways.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pagemill import Producer
from pagemill.engine.outputs import EngineStats, HistogramSnapshot
from pagemill.monitoring.metrics.engine import ENGINE_METRICS
from pagemill.monitoring.metrics.kv_cache import KV_CACHE_METRICS
from pagemill.producer.wire.calls.rollouts import Rollout
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.status.queue_exporter import QueueExporter, QueueSet
from pagemill.worker.worker import Worker
from tests.conftest import RedisServer, server_binary
from tests.integration.prometheus.clients import Clients
from tests.integration.prometheus.faults import FAULTS, Fault
from tests.monitoring.prometheus_server import (
    SERIES,
    PrometheusServer,
    alerts,
    panel_queries,
    program,
    substituted,
)
from tests.producer.gateway.serving import Served, gateway
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, worker_config

pytestmark = pytest.mark.slow

JOB = "pagemill-workers"
EXPORTER_JOB = "pagemill-exporter"
GATEWAY_JOB = "pagemill-gateways"
PREFIX = "One shared beginning of every prompt, long enough to fill a few blocks of the KV cache. "
LABELS = ["positive", "negative", "neutral"]

EMPTY_PANELS = {
    "Pagemill: engine / GPU busy / A": "needs the DCGM exporter",
    "Pagemill: engine / Memory by use / A": "echo has no weights and no device cache",
    "Pagemill: reliability / Memory / B": "the server has no memory limit",
    "Pagemill: queue / Share and agreement / B": "no jobs of the rollout are compared",
}
"""Panel queries without data here, and the reasons."""

EMPTY_ALERT_SERIES = {
    "DCGM_FI_DEV_THERMAL_VIOLATION": "needs the DCGM exporter",
    "DCGM_FI_DEV_POWER_VIOLATION": "needs the DCGM exporter",
}
"""Series of alerts that do not exist here, and the reasons."""

NOT_PROVOKED = {
    "PagemillGpuThrottled": "needs a GPU and the DCGM exporter",
    "PagemillPrefixHitRateDropped": "compares with a day ago",
    "PagemillQueueOldestJobTooOld": "a job would have to wait for a minute",
    "PagemillQueueGrowing": "the queue would have to take an hour",
    "PagemillQueueDrainTooLong": "the queue would have to take a day",
    "PagemillSlowJobsBudgetBurn": "jobs would have to take ten minutes",
    "PagemillSlowFirstTokensBudgetBurn": "a question of the machine that runs the test",
    "PagemillKvCacheWasteHigh": "a question of lengths; its inputs are compared with the engine's own",
    "PagemillInvalidLogits": "echo has no logits",
    "PagemillStructuredOutputInvalid": "echo's grammars are always satisfied",
    "PagemillDiscardedTokensHigh": "a question of shares; its inputs are compared with the worker's own",
    "PagemillWorkerNotScraped": "a worker would have to run unscraped for ten minutes",
    "PagemillRedisAofFsyncDelayed": "needs a slow disk",
    "PagemillRedisWritesSlow": "needs a slow disk",
    "PagemillClockSkew": "needs two clocks",
    "PagemillWorkerQuarantined": "needs workers that compute differently; tests/worker/audit has them",
    "PagemillRolloutHalted": "needs workers of two revisions; what is read of a halted one, test_queue_reader.py tests",
    "PagemillSubmitsRefusedForMemory": "its rule is tested with promtool, what it counts on a server of 30 MB",
}
"""Alerts that no fault below raises, and the reasons. promtool tests all of them."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    program("prometheus")  # before any process is started needlessly
    with RedisServer(server_binary("valkey-server"), tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: RedisServer) -> Iterator[QueueClient]:
    with QueueClient(server.url, "watched") as client:
        yield client


@pytest.fixture(scope="module")
def worker(client: QueueClient) -> Iterator[Worker]:
    """A small pool, so that blocks are evicted, and more batch slots than it can ever fill."""
    config = worker_config(
        client.url,
        client.queue,
        model="echo:1",
        num_kv_blocks=400,
        max_num_seqs=128,
        max_num_batched_tokens=256,
        vllm_metric_names=True,
    )
    worker = Worker(config, client.url)
    worker.start()
    assert worker.wait_ready(timeout=PATIENCE_S)
    yield worker
    end(worker)


def end(worker: Worker) -> None:
    """Drain and close, once."""
    if worker.http_url is not None:
        worker.drain(0.0, SignalFlag(), time.monotonic() + 20)
        assert worker.close()


@pytest.fixture(scope="module")
def exporter(client: QueueClient) -> Iterator[QueueExporter]:
    exporter = QueueExporter(QueueSet(client.url, [client.queue]), "127.0.0.1", 0)
    yield exporter
    exporter.close()


@pytest.fixture(scope="module")
def served(client: QueueClient) -> Iterator[Served]:
    with gateway(client.url, client.queue, models=("echo",)) as served:
        yield served


def address(url: str | None) -> str:
    assert url is not None
    return url.removeprefix("http://")


@pytest.fixture(scope="module")
def prometheus(
    worker: Worker, exporter: QueueExporter, served: Served, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    targets = {
        JOB: [address(worker.http_url)],
        EXPORTER_JOB: [address(exporter.url)],
        GATEWAY_JOB: [address(served.url)],
    }
    server = PrometheusServer(tmp_path_factory.mktemp("prometheus"), targets)
    server.start()
    yield server
    server.stop()


class Load:
    """Jobs of every kind, a few together, until it is stopped."""

    def __init__(self, client: QueueClient) -> None:
        self._client = QueueClient(client.url, client.queue)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._count = 0
        self._job_ids: list[str] = []

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.wait(self._job_ids)
        self._client.redis.close()

    def _run(self) -> None:
        with Producer(self._client.url, queue=self._client.queue) as producer:
            self._submit(producer)

    def _submit(self, producer: Producer) -> None:
        while not self._stop.is_set():
            started = self._client.submit(*self._jobs())
            estimated = producer.submit(prompt=PREFIX, model="echo", max_tokens=20, estimate="flag")
            self._job_ids += [*started, estimated.id]
            self._job_ids.append(self._client.submit_raw(b"no json"))
            if self._count % 3 == 0:
                self._client.cancel(started[0])
            self._stop.wait(0.2)

    def _jobs(self) -> list[dict[str, Any]]:
        self._count += 1
        row = f"{PREFIX}Row {self._count}."
        return [
            {"prompt": row * 2, "max_tokens": 150, "stream": True},
            {"prompt": row, "max_tokens": 30, "priority": "high"},
            {"prompt": row, "max_tokens": 20, "n": 2, "temperature": 1.0, "seed": self._count},
            {"prompt": row, "structured_outputs": {"choice": LABELS}},
            {"prompt": row, "structured_outputs": {"regex": f"row {self._count}[ab]"}},
            {
                "prompt": f"{self._count} is quite another beginning. " * 6,
                "max_tokens": 10,
                "priority": "low",
            },
        ]


@pytest.fixture(scope="module")
def worked(client: QueueClient, prometheus: PrometheusServer) -> None:
    """Prometheus has scraped the worker under load, whichever test runs first."""
    with Load(client):
        eventually(
            lambda: prometheus.numbers("pagemill_kv_cache_utilization_ratio > 0"), "blocks that are in use"
        )


def soon(prometheus: PrometheusServer, expr: str, *expected: float) -> None:
    """Wait for the values: all series are absent after a scrape to which a busy machine responds too late."""
    eventually(lambda: prometheus.numbers(expr) == list(expected), expr)


@contextlib.contextmanager
def rolled_out(client: QueueClient) -> Iterator[None]:
    """A share of the jobs is for a revision that no worker announces, so that the worker takes them as well."""
    with Producer(client.url, queue=client.queue) as producer:
        rollout = producer.rollout("echo")
        rollout.start(Rollout("canary", share=0.3, margin=1.0), force=True)
        yield
        rollout.finish()


def test_every_panel_shows_something_under_load(
    client: QueueClient, worker: Worker, served: Served, prometheus: PrometheusServer
) -> None:
    def empty() -> set[str]:
        queries = ((place, substituted(expr, window="30s")) for place, expr in panel_queries())
        return {place for place, expr in queries if not prometheus.numbers(expr)}

    with Clients(client, served), Load(client), rolled_out(client):
        missing: set[str] = set()

        def only_what_the_table_says() -> bool:
            missing.clear()
            missing.update(empty())
            return missing <= set(EMPTY_PANELS)

        try:
            eventually(only_what_the_table_says, "data in every panel")
        except AssertionError:
            pytest.fail(f"without data: {sorted(missing - set(EMPTY_PANELS))}")
        assert missing == set(EMPTY_PANELS), "the table lists what is there after all"


@pytest.mark.usefixtures("worked")
def test_prometheus_has_the_engines_own_numbers(
    client: QueueClient, worker: Worker, prometheus: PrometheusServer
) -> None:
    """Every sample of every engine metric, once the worker is idle; the queue's from both of its exporters."""

    def idle() -> EngineStats | None:
        stats = worker.engine.stats
        return stats if stats is not None and not stats.scheduler.running else None

    def found() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        series = prometheus.query(f'{{__name__=~"pagemill_.+", job="{JOB}"}}')
        samples = {}
        for one in series:
            labels = {k: v for k, v in one["metric"].items() if k not in ("__name__", "instance", "job")}
            samples[one["metric"]["__name__"], frozenset(labels.items())] = float(one["value"][1])
        return samples

    def agreed() -> EngineStats | None:
        """The statistics, which an idle engine may still republish, if Prometheus has scraped these."""
        stats = idle()
        if stats is None or not stats.requests.generated_tokens:
            return None
        expected = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for metric in (*KV_CACHE_METRICS, *ENGINE_METRICS)
            for sample in metric.family(stats).samples
        }
        samples = found()
        return stats if {key: samples.get(key) for key in expected} == expected else None

    stats = eventually(agreed, "the engine's numbers in Prometheus")
    assert isinstance(stats.histograms["step_seconds"]["forward", "decode"], HistogramSnapshot)
    succeeded = client.stats().counts["succeeded"]
    soon(prometheus, 'pagemill_queue_ended_jobs_total{outcome="succeeded"}', succeeded, succeeded)
    soon(prometheus, 'pagemill_jobs_finished_total{outcome="succeeded"}', succeeded)
    soon(prometheus, "vllm:generation_tokens_total", stats.requests.generated_tokens)


@pytest.mark.usefixtures("worked")
def test_the_block_states_summed_to_the_capacity_at_every_scrape(
    worker: Worker, prometheus: PrometheusServer
) -> None:
    difference = (
        "(sum without (state) (pagemill_kv_cache_blocks) - pagemill_kv_cache_capacity_blocks)[10m:1s]"
    )
    eventually(lambda: prometheus.numbers(f"count_over_time({difference}) > 1"), "scrapes")
    assert prometheus.numbers(f"max_over_time({difference})") == [0]
    assert prometheus.numbers(f"min_over_time({difference})") == [0]
    assert prometheus.numbers("max_over_time(pagemill_kv_cache_utilization_ratio[10m])")[0] > 0
    soon(prometheus, "pagemill_kv_cache_accounting_errors_total", 0)


def test_every_alert_is_about_series_that_are_there(worker: Worker, prometheus: PrometheusServer) -> None:
    missing = set()
    for alert in alerts():
        prometheus.query(alert.expr)  # raises when it does not run
        for name, matchers in SERIES.findall(alert.expr):
            if not prometheus.query(f"last_over_time({name}{matchers}[10m])"):
                missing.add(name)
    assert missing == set(EMPTY_ALERT_SERIES)


def test_a_healthy_worker_raises_no_critical_alert(worker: Worker, prometheus: PrometheusServer) -> None:
    """Soon, not immediately: after a late scrape on a busy machine the target counts as down."""
    critical = {alert.name for alert in alerts() if alert.severity == "critical"}
    eventually(lambda: not prometheus.firing() & critical, "no critical alert")


AT_THE_END = {
    "PagemillRedisDown", "PagemillResultBufferGrowing", "PagemillWorkerDegraded", "PagemillScrapeIncomplete",
    "PagemillNoMetrics", "PagemillTargetDown",
}  # fmt: skip
"""Raised by the steps after the faults."""


AT_THE_GATEWAY = {
    "PagemillGatewayErrors",
    "PagemillGatewayStreamsBreakOff",
    "PagemillGatewayRefusesRequests",
}
"""Raised by the requests of the test below; the first also by Redis' absence."""


def test_a_gateway_that_fails_its_clients_says_so(
    client: QueueClient, served: Served, prometheus: PrometheusServer
) -> None:
    """A full queue rejects some requests, and deadlines end others before and within their streams."""
    clients = Clients(client, served)
    seen: set[str] = set()

    def all_seen() -> bool:
        clients.break_off()
        clients.overfill()
        seen.update(prometheus.firing())
        return seen >= AT_THE_GATEWAY

    try:
        eventually(all_seen, "the alerts")
    except AssertionError:
        pytest.fail(f"did not fire: {sorted(AT_THE_GATEWAY - seen)}")
    clients.wait_for_the_end()


@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_raises_its_alerts(
    fault: Fault,
    expected: set[str],
    client: QueueClient,
    worker: Worker,
    prometheus: PrometheusServer,
) -> None:
    seen: set[str] = set()

    def all_seen() -> bool:
        seen.update(prometheus.firing())
        return expected <= seen

    for _ in range(3):  # on a machine so fast that a fault ends between two scrapes, it is repeated
        fault(client, worker, all_seen)
        with contextlib.suppress(AssertionError):
            eventually(all_seen, "the alerts", patience_s=40)
            break
    assert expected <= seen, f"{fault.__name__} did not raise {sorted(expected - seen)}"
    for alert in prometheus.alerts():
        for text in alert["annotations"].values():
            assert "error expanding" not in text, f"the template of {alert['labels']['alertname']}: {text}"


def test_every_alert_is_provoked_or_listed() -> None:
    provoked = (AT_THE_END | AT_THE_GATEWAY).union(*(expected for _, expected in FAULTS))
    assert provoked.isdisjoint(NOT_PROVOKED)
    assert provoked | set(NOT_PROVOKED) == {alert.name for alert in alerts()}


def test_without_its_server_the_worker_says_so_and_recovers(
    server: RedisServer, client: QueueClient, worker: Worker, served: Served, prometheus: PrometheusServer
) -> None:
    client.redis.config_set("maxmemory", 0)
    client.pause(False)
    (job_id,) = client.submit({"prompt": "0123456789" * 40, "max_tokens": 400})
    eventually(lambda: client.generated(job_id) >= 1, "a job that runs")
    server.kill()
    assert Clients(client, served).ask(max_tokens=1) == 503
    seen: set[str] = set()
    at_redis = AT_THE_END - {"PagemillTargetDown", "PagemillScrapeIncomplete"}

    def all_seen() -> bool:
        seen.update(prometheus.firing())
        return at_redis <= seen

    try:
        eventually(all_seen, "the alerts")
    except AssertionError:
        pytest.fail(f"did not fire: {sorted(at_redis - seen)}")
    server.start()
    eventually(lambda: "PagemillRedisDown" not in prometheus.firing(), "the end of the alert")
    eventually(lambda: "PagemillNoMetrics" not in prometheus.firing(), "the end of the alert")


def test_scrapes_that_lack_a_source_are_told_of(
    worker: Worker, prometheus: PrometheusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> None:
        raise TimeoutError("the queue cannot be read")

    def is_firing() -> bool:
        """For the worker: the exporter's scrapes may have failed while the server was down."""
        return any(
            alert["labels"].get("instance") == address(worker.http_url)
            and alert["labels"].get("source") == "queue"
            and alert["state"] == "firing"
            for alert in prometheus.alerts()
            if alert["labels"]["alertname"] == "PagemillScrapeIncomplete"
        )

    monkeypatch.setattr(worker._queue_reader, "read", unreadable)
    eventually(is_firing, "the alert")


def test_a_backlog_without_any_worker_is_seen_by_the_exporter(
    client: QueueClient, exporter: QueueExporter, worker: Worker, prometheus: PrometheusServer
) -> None:
    """The worker stops; a job that is submitted afterwards waits."""
    end(worker)
    eventually(lambda: "PagemillTargetDown" in prometheus.firing(), "the alert")
    client.submit({"prompt": "anybody there?"})

    def echo_is_missed() -> bool:
        return any(
            alert["labels"]["alertname"] == "PagemillWorkerDown"
            and alert["labels"]["model"] == "echo"
            and alert["state"] == "firing"
            for alert in prometheus.alerts()
        )

    eventually(echo_is_missed, "the alert")
