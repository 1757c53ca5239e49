"""Webhooks against a real https receiver: the requests, the retries, and the URLs that are never called."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill import JobFailed, Producer
from pagemill.engine.errors import ConfigError
from pagemill.producer.wire.calls import outbox
from pagemill.producer.wire.calls.history import history
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.webhooks import delivery
from pagemill.worker.webhooks import sender
from tests.topologies import Certificates
from tests.webhook_receiver import Receiver
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

SECRET = "whsec_" + base64.b64encode(b"s" * 24).decode()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def receiver(certificates: Certificates) -> Iterator[Receiver]:
    receiver = Receiver(certificates)
    yield receiver
    receiver.close()


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer:
        yield producer


def config(client: QueueClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """A worker that may call the receiver, which is on a private address."""
    with monkeypatch.context() as patch:
        patch.setenv("PAGEMILL_WEBHOOK_SECRETS", f"{SECRET},older-secret")
        hosts = f"localhost:{receiver.server.server_address[1]}"
        allowed = {"webhook_hosts": hosts, "webhook_allow_private": True, "webhook_retry_s": 0.1}
        ca_file = str(receiver.certificates.ca_file)
        return worker_config(client.url, client.queue, **(allowed | {"webhook_ca_file": ca_file} | settings))


def outbox_size(client: QueueClient) -> int:
    return int(client.redis.zcard(f"{keys.prefix(client.queue)}outbox"))


def check_signature(headers: dict[str, str], body: bytes) -> None:
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = [
        "v1," + base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()
        for secret in (b"s" * 24, b"older-secret")
    ]
    assert headers["webhook-signature"].split(" ") == expected
    assert abs(time.time() - int(headers["webhook-timestamp"])) < 300


@pytest.mark.slow
def test_every_end_is_told_once_and_signed(
    producer: Producer, client: QueueClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_worker(config(client, receiver, monkeypatch)) as worker:
        good = producer.submit(
            prompt="told", model="echo", max_tokens=4, webhook=receiver.url, metadata={"order": 7},
            tenant="acme",
        )  # fmt: skip
        late = producer.submit(prompt="p", model="echo", delay=3600.0, webhook=receiver.url)
        bad = producer.submit(prompt_token_ids=[10**6], model="echo", webhook=receiver.url)
        assert good.result(timeout=120).text == "told"
        assert late.cancel()
        with pytest.raises(JobFailed):
            bad.result(timeout=120)
        eventually(lambda: len(receiver.received) == 3 and not outbox_size(client), "three deliveries")
        assert worker.counters.webhooks.read()["delivered"] == 3
    events = {}
    for headers, body in receiver.received:
        check_signature(headers, body)
        assert headers["content-type"] == "application/json"
        events[headers["webhook-id"]] = json.loads(body)
    assert {event["type"] for event in events.values()} == {"job.succeeded", "job.cancelled", "job.failed"}
    told = events[good.id]["data"]
    assert told["result"]["outputs"][0]["text"] == "told"
    assert (told["id"], told["tenant"], told["metadata"]) == (good.id, "acme", {"order": 7})
    assert events[bad.id]["data"]["error"]["code"] == "invalid_job"


@pytest.mark.slow
def test_what_fails_is_tried_again_and_a_redirect_is_a_failure(
    producer: Producer, client: QueueClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answers[:] = [500, 302, 200]
    with running_worker(config(client, receiver, monkeypatch)) as worker:
        job = producer.submit(prompt="p", model="echo", max_tokens=1, webhook=receiver.url)
        job.result(timeout=120)
        eventually(lambda: not outbox_size(client), "the delivery")
        assert worker.counters.webhooks.read() == {
            "delivered": 1, "failed": 2, "given_up": 0, "refused": 0,
        }  # fmt: skip
    assert len(receiver.received) == 3
    assert len({body for _, body in receiver.received}) == 1


@pytest.mark.slow
def test_what_never_succeeds_is_given_up(
    producer: Producer, client: QueueClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answers[:] = [500]
    monkeypatch.setattr(sender, "MAX_TRIES", 2)
    with running_worker(config(client, receiver, monkeypatch)) as worker:
        job = producer.submit(prompt="p", model="echo", max_tokens=1, webhook=receiver.url)
        job.result(timeout=120)
        eventually(lambda: worker.counters.webhooks.read()["given_up"] == 1, "the last try")
        eventually(lambda: not outbox_size(client), "an empty outbox")
    assert len(receiver.received) == 2


@pytest.mark.slow
def test_a_receiver_that_hangs_delays_no_commit(
    producer: Producer, client: QueueClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.hang.clear()
    with running_worker(config(client, receiver, monkeypatch)):
        jobs = ({"prompt": "p", "model": "echo", "max_tokens": 1, "webhook": receiver.url} for _ in range(40))
        batch = producer.submit_many(jobs)
        assert batch.wait(timeout=120).succeeded == 40
        assert outbox_size(client) == 40
        receiver.hang.set()
        eventually(lambda: not outbox_size(client), "the deliveries")
    assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 40


@pytest.mark.slow
def test_a_receiver_that_hangs_delays_no_other(
    producer: Producer,
    client: QueueClient,
    receiver: Receiver,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "TIMEOUT_S", 3600.0)
    hanging = Receiver(certificates, hang_s=3600.0)
    hanging.hang.clear()
    hosts = ",".join(f"localhost:{each.server.server_address[1]}" for each in (receiver, hanging))
    jobs = [{"prompt": "p", "model": "echo", "max_tokens": 1, "webhook": hanging.url} for _ in range(16)]
    jobs += [job | {"webhook": receiver.url} for job in jobs[:1] * 112]
    random.Random(1).shuffle(jobs)
    try:
        with running_worker(config(client, receiver, monkeypatch, webhook_hosts=hosts)) as worker:
            assert producer.submit_many(jobs).wait(timeout=120).succeeded == 128
            eventually(lambda: len(receiver.received) == 112, "the deliveries to the healthy receiver")
            eventually(lambda: outbox_size(client) == 16, "the rest")
            assert 1 <= len(hanging.received) < 16
            eventually(
                lambda: worker.counters.webhooks_pending["in_flight"] == len(hanging.received), "the gauge"
            )
            assert sum(worker.counters.webhooks_pending.values()) == 16
            hanging.hang.set()
            eventually(lambda: not outbox_size(client), "the other deliveries")
            assert worker.counters.webhooks.read()["delivered"] == 128
    finally:
        hanging.close()
    assert len({headers["webhook-id"] for headers, _ in (*receiver.received, *hanging.received)}) == 128


@pytest.mark.slow
def test_a_receiver_that_fails_is_left_alone_for_a_while(
    producer: Producer, client: QueueClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deliveries that wait for it are postponed, which is not an attempt."""
    receiver.answers[:] = [503]
    with running_worker(config(client, receiver, monkeypatch, webhook_retry_s=3600.0)) as worker:
        jobs = ({"prompt": "p", "model": "echo", "max_tokens": 1, "webhook": receiver.url} for _ in range(40))
        batch = producer.submit_many(jobs)
        assert batch.wait(timeout=120).succeeded == 40
        eventually(lambda: worker.counters.webhook_receivers_paused == 1, "the pause")
        eventually(
            lambda: worker.counters.webhooks_pending == {"due": 0, "in_flight": 0, "later": 40}, "the rest"
        )
        assert len(receiver.received) == 2
        prefix = keys.prefix(client.queue)
        tries = [
            client.redis.hget(f"{prefix}job:{job_id.decode()}", "notified")
            for job_id in client.redis.zrange(f"{prefix}outbox", 0, -1)
        ]
        assert tries.count(None) == 38


@pytest.mark.slow
def test_an_answer_of_410_is_final_and_retry_after_is_respected(
    producer: Producer, client: QueueClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answers[:] = [410, 429]
    receiver.headers["retry-after"] = "120"
    with running_worker(config(client, receiver, monkeypatch)) as worker:
        job: dict[str, Any] = {"prompt": "p", "model": "echo", "max_tokens": 1, "webhook": receiver.url}
        given_up = producer.submit(**job)
        given_up.result(timeout=120)
        eventually(lambda: worker.counters.webhooks.read()["given_up"] == 1, "the end")
        eventually(lambda: not outbox_size(client), "an empty outbox")
        failed = producer.submit(**job)
        failed.result(timeout=120)
        eventually(lambda: worker.counters.webhooks.read()["failed"] == 1, "the failure")
        eventually(lambda: worker.counters.webhooks_pending["later"] == 1, "the next attempt's time")
        ((_, due_ms),) = client.redis.zrange(f"{keys.prefix(client.queue)}outbox", 0, -1, withscores=True)
        seconds, microseconds = client.redis.time()
        assert 60 < due_ms / 1000 - seconds - microseconds / 1e6 <= 120
        outcomes = [client.run(history(client.queue, job.id)).webhook for job in (given_up, failed)]
        assert [(each.tries, each.outcome, each.next_at) for each in outcomes] == [
            (1, "given up: the receiver answered 410", None),
            (1, "failed: the receiver answered 429", due_ms / 1000),
        ]
    assert len(receiver.received) == 2


@pytest.mark.slow
def test_a_delivery_whose_worker_died_is_made_by_another(
    producer: Producer, client: QueueClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_worker(config(client, receiver, monkeypatch)) as worker:
        assert worker.webhooks is not None
        worker.webhooks.stop(timeout=5)
        job = producer.submit(prompt="p", model="echo", max_tokens=1, webhook=receiver.url)
        job.result(timeout=120)
        (first,) = client.run(outbox.claim(client.queue, 8, 1))
        time.sleep(0.01)
        (again,) = client.run(outbox.claim(client.queue, 8, 60_000))
        assert (first.tries, again.tries) == (1, 2)
        assert client.run(outbox.claim(client.queue, 8, 60_000)) == []
        assert not client.run(outbox.finish_delivery(client.queue, job.id, first.tries, None)), (
            "its claim had lapsed"
        )
        assert outbox_size(client) == 1
        assert client.run(outbox.finish_delivery(client.queue, job.id, again.tries, 0))
    with running_worker(config(client, receiver, monkeypatch)):
        eventually(lambda: not outbox_size(client), "the delivery")
    assert len(receiver.received) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "url", "reason"),
    [
        ({"webhook_hosts": ""}, "https://hooks.example.com/", "switched off"),
        ({}, "https://hooks.example.com/", "webhook_hosts"),
        ({}, "https://localhost/", "port"),
    ],
)
def test_a_job_with_a_webhook_that_may_not_be_called_is_refused(
    producer: Producer,
    client: QueueClient,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    url: str,
    reason: str,
) -> None:
    with running_worker(config(client, receiver, monkeypatch, **settings)):
        with pytest.raises(JobFailed, match=reason) as failed:
            producer.submit(prompt="p", model="echo", webhook=url).result(timeout=120)
        assert failed.value.code == "unsupported_feature"


@pytest.mark.slow
def test_private_addresses_are_not_called(
    producer: Producer,
    client: QueueClient,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with running_worker(config(client, receiver, monkeypatch, webhook_allow_private=False)) as worker:
        job = producer.submit(prompt="p", model="echo", max_tokens=1, webhook=receiver.url)
        assert job.result(timeout=120).text == "p"
        eventually(lambda: worker.counters.webhooks.read()["refused"] == 1, "the refusal")
        eventually(lambda: outbox_size(client) == 0, "an empty outbox")  # acknowledged after it was counted
    assert receiver.received == []


@pytest.mark.slow
def test_a_certificate_that_is_not_trusted_is_not_talked_to(
    producer: Producer,
    client: QueueClient,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    other = Certificates(tmp_path / "other")
    settings = {"webhook_ca_file": str(other.ca_file), "webhook_retry_s": 60.0}
    with running_worker(config(client, receiver, monkeypatch, **settings)) as worker:
        producer.submit(prompt="p", model="echo", max_tokens=1, webhook=receiver.url).result(timeout=120)
        eventually(lambda: worker.counters.webhooks.read()["failed"] == 1, "the failure")
    assert receiver.received == []


def test_without_a_secret_no_worker_starts(client: QueueClient) -> None:
    with pytest.raises(ConfigError, match="webhook_secrets"):
        worker_config(client.url, client.queue, webhook_hosts="localhost")
