"""The client's view of the load: the wait, and when to retry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from pagemill import AsyncProducer
from pagemill.producer.gateway import load_signals
from pagemill.producer.gateway.metrics import GatewayMetrics
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.metering.quotas import Quota, Remaining, TenantQuotas, set_quotas
from pagemill.producer.wire.calls.submissions import prepare
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue, open_queue
from tests.producer.gateway.serving import Served, gateway
from tests.worker.harness import PATIENCE_S, eventually

WAIT = "x-pagemill-queue-seconds"
BUSY: Any = {"model": "m", "max_tokens": 100}


@pytest.fixture
def lane(valkey_url: str, queue_name: str) -> Iterator[Queue]:
    """A queue whose only worker does nothing."""
    found = open_queue(valkey_url, queue_name)
    announce(found)
    yield found
    found.transport.close()


def open_client(served: Served) -> OpenAI:
    return OpenAI(base_url=served.base_url, api_key="x", max_retries=0, timeout=PATIENCE_S)


def announce(lane: Queue) -> None:
    """A worker with one batch slot that computes ten tokens per second, for models m and n."""
    speed = registry.Speed(rows=1, busy_rate=10.0, free_rate=10.0)
    info = registry.WorkerInfo(id="w", models=("m", "n"), speed=speed)
    lane.run(registry.heartbeat(lane.name, info))


def test_every_answer_says_how_long_a_request_waits(served: Served, client: OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return client.completions.with_raw_response.create(model="echo", prompt="x", **more)

    eventually(lambda: WAIT in ask().headers, "the worker's speed")
    for answer in (
        ask(),
        ask(stream=True),
        client.responses.with_raw_response.create(model="echo", input="x"),
    ):
        assert 0.0 <= float(answer.headers[WAIT]) < PATIENCE_S
        assert "x-estimated-p50" not in answer.headers


@pytest.mark.slow
def test_a_request_that_would_wait_past_its_limit_is_to_come_back(lane: Queue) -> None:
    with gateway(lane.url, lane.name) as served, open_client(served) as client:
        for number in range(5):
            lane.submit(f"job-{number}", model="m", max_tokens=100)
        ask = client.with_options(default_headers={"x-request-timeout": "20"})
        with pytest.raises(openai.RateLimitError) as late:
            ask.completions.create(prompt="x", **BUSY)
        assert late.value.code == "deadline_unreachable"
        assert 20 < float(late.value.response.headers[WAIT]) < 100
        assert int(late.value.response.headers["retry-after"]) > 0
        assert lane.client.hget(f"{lane.prefix}counts", "queued") == b"5"
        with pytest.raises(openai.APIStatusError) as expired:  # it may be the key of an earlier job
            ask.completions.create(
                prompt="x", extra_headers={"x-request-timeout": "0.3", "idempotency-key": "k"}, **BUSY
            )
        assert expired.value.status_code == 504
        background = client.responses.with_raw_response.create(model="m", input="x", background=True)
        assert float(background.headers[WAIT]) > 20


def test_a_request_over_its_tenant_s_quota_is_to_come_back(lane: Queue) -> None:
    lane.run(set_quotas(lane.name, {"default": Quota(tokens_per_minute=50, jobs_per_day=100)}))
    lane.submit("first", model="m", max_tokens=40, tenant="default")
    lane.pull_one()
    with gateway(lane.url, lane.name) as served, open_client(served) as client:
        with pytest.raises(openai.RateLimitError) as over:
            client.completions.create(prompt="x", **BUSY)
        assert over.value.code == "quota_exceeded"
        assert 0 < int(over.value.response.headers["retry-after"]) <= 60
        assert WAIT in over.value.response.headers
        assert client.responses.create(model="m", input="x", background=True).status == "queued"


def test_a_quota_s_pause() -> None:
    day, minute = Remaining(10, 1, 5000.0), Remaining(60, 30, 30.0)
    assert TenantQuotas(tokens_per_minute=minute).pause_s(30) == 0.0
    assert TenantQuotas(tokens_per_minute=minute).pause_s(40) == 10.0
    assert TenantQuotas(tokens_per_minute=minute).pause_s(1000) == 30.0, "it waits for the whole quota"
    assert TenantQuotas(tokens_per_minute=minute, jobs_per_day=day).pause_s(1) == 0.0
    assert TenantQuotas(jobs_per_day=Remaining(10, 0, 5000.0)).pause_s(1) == 5000.0


@pytest.mark.slow
async def test_the_lanes_of_which_it_asked_are_bounded(lane: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_signals, "MAX_LANES", 2)
    async with AsyncProducer(lane.url, queue=lane.name) as producer:
        signals = load_signals.LoadSignals(producer, GatewayMetrics())
        for model in "mnop":
            job = Job.parse({"prompt": "x", "model": model})
            item, estimate = await signals.expect(job, prepare(job, f"job-{model}"), None, has_client=True)
            assert (b'"estimate"' in item.header) == (estimate.wait_s is not None) == (model in "mn")
    assert [name.rpartition(":")[2] for name in signals.lanes] == ["o", "p"]
