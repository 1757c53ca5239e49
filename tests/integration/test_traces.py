"""Traces of real jobs: a producer, a worker and the OpenTelemetry SDK with its in-memory exporter."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pagemill import AsyncProducer, JobFailed, Producer
from pagemill.monitoring.tracing import ExecutionTrace, Tracing
from pagemill.worker.worker import Worker
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

SECRET = "a prompt that belongs to its owner"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """This process as an application that has configured its SDK."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
    return exporter


@pytest.fixture
def worker(client: QueueClient, valkey_url: str, spans: InMemorySpanExporter) -> Iterator[Worker]:
    with running_worker(worker_config(valkey_url, client.queue, model="echo:2")) as worker:
        yield worker


def wait_for(spans: InMemorySpanExporter, name: str, count: int = 1) -> list[ReadableSpan]:
    """The spans of that name; a job's spans are created just after its commit."""
    return eventually(
        lambda: (
            found
            if len(found := [s for s in spans.get_finished_spans() if s.name == name]) >= count
            else None
        ),
        f"{count} spans {name}",
    )


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


@pytest.mark.slow
def test_a_job_is_one_trace_from_publish_to_commit(worker: Worker, spans: InMemorySpanExporter) -> None:
    with Producer(worker_url(worker), queue=worker.config.queue) as producer:
        job = producer.submit(prompt=SECRET, model="echo", max_tokens=12, temperature=0.5, seed=7)
        job.result(timeout=120)
    wait_for(spans, "commit")
    by_name = {span.name: span for span in spans.get_finished_spans()}
    assert set(by_name) == {"publish", "queue", "text_completion echo", "prefill", "decode", "commit"}
    publish, execution = by_name["publish"], by_name["text_completion echo"]
    assert len({span.context.trace_id for span in by_name.values() if span.context}) == 1
    assert publish.context is not None
    assert execution.context is not None
    assert (publish.kind, execution.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert parent_of(publish) is None
    assert parent_of(by_name["queue"]) == parent_of(execution) == publish.context.span_id
    for inner in ("prefill", "decode", "commit"):
        assert parent_of(by_name[inner]) == execution.context.span_id
    order = [by_name[name] for name in ("queue", "prefill", "decode", "commit")]
    starts = [span.start_time or 0 for span in order]
    assert starts == sorted(starts), "one after the other"
    assert by_name["queue"].end_time == execution.start_time
    assert by_name["prefill"].end_time == by_name["decode"].start_time
    assert by_name["commit"].end_time == execution.end_time
    attributes = dict(execution.attributes or {})
    wanted = {
        "gen_ai.operation.name": "text_completion", "gen_ai.request.model": "echo", "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.seed": 7, "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length",), "messaging.message.id": job.id, "pagemill.outcome": "succeeded",
        "messaging.destination.name": worker.config.queue,
    }  # fmt: skip
    assert {name: attributes[name] for name in wanted} == wanted
    assert attributes["gen_ai.usage.input_tokens"] == len(SECRET)
    assert SECRET not in "".join(span.to_json() for span in by_name.values())


def test_a_job_that_starts_before_the_server_s_millisecond_ends(spans: InMemorySpanExporter) -> None:
    tracing = Tracing.from_environment("worker", "0.1.0")
    assert tracing is not None
    execution_trace = ExecutionTrace(
        job_id="job", queue="queue", traceparent=None, operation="text_completion", model="echo",
        submitted_at=100.002, started_at=100.0005, first_token_at=None, left_engine_at=None,
        commit_began=100.003, commit_ended=100.004, outcome="succeeded",
    )  # fmt: skip
    tracing.record(execution_trace)
    by_name = {span.name: span for span in spans.get_finished_spans()}
    queue, execution = by_name["queue"], by_name["text_completion echo"]
    assert queue.start_time == queue.end_time == execution.start_time


@pytest.mark.slow
def test_the_caller_s_own_context_is_the_parent(worker: Worker, spans: InMemorySpanExporter) -> None:
    with Producer(worker_url(worker), queue=worker.config.queue) as producer:
        producer.submit(prompt="a", model="echo", traceparent=PARENT).result(timeout=120)
    (execution,) = wait_for(spans, "text_completion echo")
    (publish,) = wait_for(spans, "publish")
    assert publish.parent is not None
    assert execution.context is not None
    assert f"{execution.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{publish.parent.span_id:016x}" == PARENT.split("-")[2]


@pytest.mark.slow
def test_a_job_from_elsewhere_carries_its_traceparent(
    worker: Worker, client: QueueClient, spans: InMemorySpanExporter
) -> None:
    """Submitted manually, without Pagemill's producer and without a publish span."""
    client.wait(
        client.submit(
            {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "traceparent": PARENT}
        )
    )
    (execution,) = wait_for(spans, "chat echo")
    assert execution.parent is not None
    assert f"{execution.parent.span_id:016x}" == PARENT.split("-")[2]


@pytest.mark.slow
def test_a_batch_shares_its_publish_span_and_a_row_may_bring_its_own(
    worker: Worker, spans: InMemorySpanExporter
) -> None:
    rows = [{"prompt": f"row {n}", "model": "echo", "max_tokens": 2} for n in range(3)]
    rows.append({"prompt": "own", "model": "echo", "max_tokens": 2, "traceparent": PARENT})
    with Producer(worker_url(worker), queue=worker.config.queue) as producer:
        producer.submit_many(rows).wait(timeout=120)
    executions = wait_for(spans, "text_completion echo", 4)
    (publish,) = wait_for(spans, "publish")
    assert publish.context is not None
    parents = sorted(f"{parent_of(span):016x}" for span in executions)
    assert parents == sorted([*[f"{publish.context.span_id:016x}"] * 3, PARENT.split("-")[2]])


@pytest.mark.slow
async def test_the_asyncio_producer_does_the_same(worker: Worker, spans: InMemorySpanExporter) -> None:
    async with AsyncProducer(worker_url(worker), queue=worker.config.queue) as producer:
        job = await producer.submit(prompt="a", model="echo", max_tokens=2)
        await job.result(timeout=120)
    (execution,) = await asyncio.to_thread(wait_for, spans, "text_completion echo")
    (publish,) = await asyncio.to_thread(wait_for, spans, "publish")
    assert publish.context is not None
    assert parent_of(execution) == publish.context.span_id


@pytest.mark.slow
def test_an_error_is_marked_and_a_refused_job_has_its_trace_too(
    worker: Worker, spans: InMemorySpanExporter
) -> None:
    with Producer(worker_url(worker), queue=worker.config.queue) as producer:
        job = producer.submit(prompt="x" * 9000, model="echo")
        with pytest.raises(JobFailed):
            job.result(timeout=120)
    (execution,) = wait_for(spans, "text_completion echo")
    (publish,) = wait_for(spans, "publish")
    assert execution.status.status_code is StatusCode.ERROR
    assert (execution.attributes or {})["error.type"] == "prompt_too_long"
    assert publish.context is not None
    assert parent_of(execution) == publish.context.span_id
    assert {span.name for span in spans.get_finished_spans()} == {
        "publish",
        "queue",
        "commit",
        execution.name,
    }


@pytest.mark.slow
def test_an_execution_after_the_first_tells_no_queue_time(
    client: QueueClient, spans: InMemorySpanExporter
) -> None:
    (job_id,) = client.submit({"prompt": "x" * 300, "max_tokens": 300, "traceparent": PARENT})
    with running_worker(worker_config(client.url, client.queue, model="echo:20")):
        eventually(lambda: client.generated(job_id) > 3, "a checkpoint")
    with running_worker(worker_config(client.url, client.queue, model="echo")):
        client.wait([job_id])
    first, second = wait_for(spans, "text_completion echo", 2)
    told = [(span.attributes or {})["pagemill.outcome"] for span in (first, second)]
    assert told == ["released", "succeeded"]
    assert first.status.status_code is StatusCode.UNSET
    assert len(wait_for(spans, "queue")) == 1
    assert int(str((second.attributes or {})["pagemill.resumed_tokens"])) > 0
    assert {parent_of(span) for span in (first, second)} == {int(PARENT.split("-")[2], 16)}


@pytest.mark.slow
def test_without_an_sdk_that_is_set_up_nothing_is_traced(
    client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    with (
        running_worker(worker_config(client.url, client.queue)),
        Producer(client.url, queue=client.queue) as producer,
    ):
        job = producer.submit(prompt="a", model="echo", max_tokens=2)
        job.result(timeout=120)
        own = producer.submit(prompt="a", model="echo", traceparent=PARENT, delay=600)
    payload = json.loads(client.redis.get(f"pagemill:{{{client.queue}}}:in:{own.id}"))
    assert payload["traceparent"] == PARENT, "it is handed on as it is"


def test_a_producer_pays_no_import_for_it() -> None:
    probe = "import sys, pagemill; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=120)


def worker_url(worker: Worker) -> str:
    assert worker.config.redis_url is not None
    return worker.config.redis_url


@pytest.mark.slow
def test_an_address_in_the_environment_is_exported_to(
    client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[str, int]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, len(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = Thread(target=collector.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        with running_worker(worker_config(client.url, client.queue)):
            client.wait(client.submit({"prompt": "a", "max_tokens": 2}))
        collector.shutdown()
        thread.join()
    assert received, "the worker sends what is left when it stops"
    assert {path for path, _ in received} == {"/v1/traces"}
