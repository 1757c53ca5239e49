"""Events of background responses and batches, as receivers verify them."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from pagemill.producer.gateway.api_keys import ApiKey, KeyFileError, add_key, read_keys
from pagemill.producer.gateway.webhooks import CLAIM_MS
from pagemill.producer.wire.schema import keys as names
from tests.producer.driving import Queue, open_queue
from tests.producer.gateway.serving import Served, gateway, gateway_process, write_keys
from tests.producer.gateway.test_clients import INSTALL
from tests.topologies import Certificates
from tests.webhook_receiver import Receiver
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config

SECRET = "whsec_c29tZSBzZWNyZXQgb2YgdGhlIHdlYmhvb2tz"
LONG: dict[str, Any] = {"model": "echo", "input": "y" * 2000, "max_output_tokens": 2000}


@pytest.fixture
def receiver(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv(ssl.get_default_verify_paths().openssl_cafile_env, str(certificates.ca_file))
    receiver = Receiver(certificates)
    yield receiver
    receiver.close()


def hook(receiver: Receiver, **fields: Any) -> dict[str, Any]:
    return {
        "name": "events", "url": receiver.url, "secret": SECRET, "tenant": "shop", "allow_private": True,
    } | fields  # fmt: skip


def write_file(path: Path, *hooks: dict[str, Any]) -> dict[str, str]:
    """A key of the tenant shop, a key of another tenant, and webhooks; returns the keys."""
    made = write_keys(path, shop={"tenant": "shop"}, other={"tenant": "other"})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"webhooks": hooks}))
    return made


def connect(served: Served, key: str) -> OpenAI:
    return OpenAI(
        base_url=served.base_url, api_key=key, max_retries=0, timeout=PATIENCE_S, webhook_secret=SECRET
    )


def batch_of(client: OpenAI, *lines: bytes) -> str:
    file = client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    ).id


@pytest.mark.slow
def test_events_of_responses_and_batches_are_verified(
    tmp_path: Path, receiver: Receiver, valkey_queue: Queue
) -> None:
    path = tmp_path / "keys.json"
    keys = write_file(path, hook(receiver))
    receiver.answers[:] = [500, 204]
    with (
        running_worker(worker_config(valkey_queue.url, valkey_queue.name, model="echo")),
        gateway(
            valkey_queue.url, valkey_queue.name, keys_path=path, models=("echo",), webhook_retry_s=0.1
        ) as served,
        connect(served, keys["shop"]) as client,
        connect(served, keys["other"]) as other,
    ):
        hello: dict[str, Any] = {"model": "echo", "input": "hi", "background": True}
        expected = {("response.completed", client.responses.create(**hello).id)}
        other.responses.create(**hello)
        client.responses.create(model="echo", input="hi", store=True)
        expected.add(
            (
                "response.incomplete",
                client.responses.create(**hello | {"input": "x" * 100}, max_output_tokens=16).id,
            )
        )
        expected.add(
            ("response.failed", client.responses.create(model="echo", input="x" * 10**5, background=True).id)
        )
        cancelled = client.responses.create(**LONG, background=True)
        client.responses.cancel(cancelled.id)
        expected.add(("response.cancelled", cancelled.id))
        line = {
            "custom_id": "r",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "echo", "prompt": "x"},
        }
        expected.add(("batch.completed", batch_of(client, json.dumps(line).encode())))
        expected.add(("batch.failed", batch_of(client, b"{")))

        def events() -> set[tuple[str, str]]:
            found = [client.webhooks.unwrap(body, headers) for headers, body in list(receiver.received)]
            return {(event.type, event.data.id) for event in found}

        eventually(lambda: len(events()) == len(expected), f"the events {expected}")
        eventually(lambda: len(receiver.received) == len(expected) + 1, "the second attempt")
        assert events() == expected
        ids = [headers["webhook-id"] for headers, _ in receiver.received]
        assert len(ids) == len(set(ids)) + 1, "the one that was answered 500 was sent again"
        batch = client.batches.retrieve(next(name for kind, name in expected if kind == "batch.completed"))
        assert batch.status == "completed"
        headers, body = receiver.received[0]
        assert headers["webhook-id"] == json.loads(body)["id"]
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(body + b" ", headers)
    left = (
        valkey_queue.client.zcard(f"{names.prefix(valkey_queue.name)}{name}")
        for name in ("outbox:gateway", "ableases")
    )
    assert [*left] == [0, 0]


@pytest.mark.slow
def test_the_library_of_standard_webhooks_verifies_events(
    valkey_url: str, queue_name: str, tmp_path: Path, receiver: Receiver
) -> None:
    library = pytest.importorskip("standardwebhooks", reason=f"standardwebhooks is not installed: {INSTALL}")
    path = tmp_path / "keys.json"
    keys = write_file(path, hook(receiver))
    with (
        running_worker(worker_config(valkey_url, queue_name, model="echo")),
        gateway(valkey_url, queue_name, keys_path=path, models=("echo",)) as served,
        connect(served, keys["shop"]) as client,
    ):
        name = client.responses.create(model="echo", input="hi", background=True).id
        eventually(lambda: receiver.received, "the event")
    headers, body = receiver.received[0]
    assert library.Webhook(SECRET).verify(body, headers)["data"] == {"id": name}


@pytest.mark.slow
def test_attempts_are_bounded_and_only_wanted_events_are_sent(
    valkey_url: str, queue_name: str, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.producer.gateway.webhooks.MAX_TRIES", 2)
    path = tmp_path / "keys.json"
    keys = write_file(
        path,
        hook(receiver, name="wanted", events=["batch.failed"]),
        hook(receiver, name="private", allow_private=False),
    )
    receiver.answers[:] = [503]
    with (
        gateway(valkey_url, queue_name, keys_path=path, models=("m",), webhook_retry_s=0.01) as served,
        connect(served, keys["shop"]) as client,
    ):
        failed = batch_of(client, b"{")
        response = client.responses.create(model="m", input="x", background=True)
        client.responses.cancel(response.id)
        queue = open_queue(valkey_url, queue_name)
        for name in ("ableases", "outbox:gateway"):
            eventually(
                lambda name=name: not queue.client.exists(f"{queue.prefix}{name}"), f"the end of {name}"
            )
        queue.transport.close()
        assert client.batches.retrieve(failed).status == "failed"
    assert [json.loads(body)["type"] for _, body in receiver.received] == ["batch.failed"] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"url": "http://example.com"}, {"secret": "secret"}, {"events": ["job.succeeded"]},
        {"tenant": "no tenant"}, {"retries": 3},
    ],
)  # fmt: skip
def test_an_invalid_webhook_is_named(tmp_path: Path, receiver: Receiver, fields: dict[str, Any]) -> None:
    path = tmp_path / "keys.json"
    write_file(path, hook(receiver) | fields)
    with pytest.raises(KeyFileError, match=rf"webhooks\.0\.{next(iter(fields))}") as error:
        read_keys(path)
    assert "secret" not in str(error.value).partition(": ")[2].replace("webhooks.0.secret", "")


def test_webhooks_are_bounded_and_survive_a_new_key(tmp_path: Path, receiver: Receiver) -> None:
    path = tmp_path / "keys.json"
    write_file(path, *(hook(receiver, name=f"hook-{number}") for number in range(8)))
    add_key(path, ApiKey(name="new", sha256="0" * 64))
    assert len(json.loads(path.read_text())["webhooks"]) == 8
    write_file(path, *(hook(receiver, name=f"hook-{number}") for number in range(9)))
    with pytest.raises(KeyFileError, match="more than 8 webhooks"):
        read_keys(path)
    write_file(path, hook(receiver), hook(receiver))
    with pytest.raises(KeyFileError, match="twice"):
        read_keys(path)


def test_webhooks_are_created_listed_and_deleted(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    """Per tenant, up to a limit, and never for a private address."""
    keys = write_file(tmp_path / "keys.json")
    url = "https://93.184.216.34/events"
    with gateway(valkey_url, queue_name, keys_path=tmp_path / "keys.json") as served:

        def ask(method: str, key: str, name: str = "", **body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {keys[key]}"}
            place = f"{served.base_url}/webhook_endpoints{name}"
            return httpx.request(method, place, headers=headers, timeout=PATIENCE_S, **body)

        made = ask("POST", "shop", json={"url": url, "events": ["batch.failed"]}).json()
        assert made["secret"].startswith("whsec_")
        shown = {name: value for name, value in made.items() if name != "secret"}
        assert ask("GET", "shop").json()["data"] == [shown]
        assert ask("GET", "shop", f"/{made['id']}").json() == shown
        assert ask("GET", "other").json()["data"] == []
        for method in ("GET", "DELETE"):
            assert ask(method, "other", f"/{made['id']}").status_code == 404
        for wrong in (
            {"url": "https://127.0.0.1/x"},
            {"url": "https://localhost/x"},
            {"url": "http://93.184.216.34/x"},
            {"url": url, "events": ["response.deleted"]},
            {"url": url, "allow_private": True},
            {},
        ):
            assert ask("POST", "shop", json=wrong).status_code == 400, wrong
        for _ in range(7):
            assert ask("POST", "shop", json={"url": url}).status_code == 200
        refused = ask("POST", "shop", json={"url": url})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_webhooks")
        queue = open_queue(valkey_url, queue_name)
        assert 0 < queue.client.pttl(f"{queue.prefix}hooks:shop") <= 400 * 86_400_000
        queue.transport.close()
        assert ask("DELETE", "shop", f"/{made['id']}").json()["deleted"]
        assert ask("DELETE", "shop", f"/{made['id']}").status_code == 404
        assert len(ask("GET", "shop").json()["data"]) == 7


def are_settled(queue: Queue, batch_id: str) -> bool:
    """Whether the first attempts are over, and have stored the times of the next ones."""
    tries = queue.client.hget(f"{queue.prefix}abatch:{batch_id}", "event_tries")
    due = queue.client.zrange(f"{queue.prefix}outbox:hooks", 0, -1, withscores=True)
    return tries == b"2" and all(at < 1000 * time.time() + CLAIM_MS / 2 for _, at in due)


@pytest.mark.slow
def test_no_event_is_lost_with_a_gateway_between_two_attempts(
    receiver: Receiver, valkey_queue: Queue
) -> None:
    settings: dict[str, Any] = {"models": ("echo",), "webhook_allow_private": True}
    receiver.answers[:] = [500, 500, 204]
    with running_worker(worker_config(valkey_queue.url, valkey_queue.name, model="echo")):
        with (
            gateway_process(valkey_queue.url, valkey_queue.name, webhook_retry_s=5.0, **settings) as (
                served,
                process,
            ),
            connect(served, "none") as client,
        ):
            hook: Any = client.post("/webhook_endpoints", body={"url": receiver.url}, cast_to=dict[str, Any])
            response = client.responses.create(model="echo", input="hi", background=True)
            failed = batch_of(client, b"{")
            eventually(lambda: len(receiver.received) == 2, "the first attempts")
            eventually(lambda: are_settled(valkey_queue, failed), "the times of the second attempts")
            process.kill()
        with gateway(valkey_queue.url, valkey_queue.name, webhook_retry_s=0.1, **settings) as served:
            eventually(lambda: len(receiver.received) == 4, "the second attempts")
            verify = connect(served, "none").webhooks.unwrap
            events = [verify(body, headers, secret=hook["secret"]) for headers, body in receiver.received]
            for batch in (events[:2], events[2:]):
                assert {(event.type, event.data.id) for event in batch} == {
                    ("response.completed", response.id),
                    ("batch.failed", failed),
                }
            assert len({headers["webhook-id"] for headers, _ in receiver.received}) == 2
            for name in ("ableases", "outbox:hooks"):
                eventually(
                    lambda name=name: not valkey_queue.client.exists(f"{valkey_queue.prefix}{name}"),
                    f"the end of {name}",
                )
    assert len(receiver.received) == 4


@pytest.mark.slow
def test_webhooks_that_hang_delay_no_other_tenant(
    valkey_url: str, queue_name: str, tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagemill.producer.wire.webhooks.delivery.TIMEOUT_S", 3600.0)
    hanging = Receiver(receiver.certificates, hang_s=3600.0)
    hanging.hang.clear()
    keys = write_file(tmp_path / "keys.json", hook(hanging), hook(receiver, tenant="other", name="fine"))
    hello: dict[str, Any] = {"model": "echo", "input": "hi", "background": True}
    line = {
        "custom_id": "r",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "echo", "prompt": "x"},
    }
    try:
        with (
            running_worker(worker_config(valkey_url, queue_name, model="echo")),
            gateway(valkey_url, queue_name, keys_path=tmp_path / "keys.json", models=("echo",)) as served,
            connect(served, keys["shop"]) as shop,
            connect(served, keys["other"]) as other,
        ):
            for _ in range(20):
                shop.responses.create(**hello)
            batch_of(shop, json.dumps(line).encode())
            eventually(lambda: hanging.received, "the first event of the shop")
            for _ in range(20):
                other.responses.create(**hello)
            batch = batch_of(other, json.dumps(line).encode())
            eventually(lambda: len(receiver.received) == 21, "the events of the other tenant")
            assert other.batches.retrieve(batch).status == "completed"
            assert len(hanging.received) <= 3, "two responses and the batch"
            hanging.hang.set()
            eventually(lambda: len(hanging.received) == 21, "the events of the shop")
    finally:
        hanging.close()
    for each in (receiver, hanging):
        assert len({headers["webhook-id"] for headers, _ in each.received}) == 21
