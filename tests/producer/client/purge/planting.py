"""Data of every kind of two tenants on one queue, through the real clients, and an independent check of all keys."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from openai import OpenAI

from pagemill.producer.client.handles import BatchHandle
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import limits
from pagemill.producer.wire.calls.metering import quotas
from pagemill.producer.wire.calls.metering.quotas import Quota
from pagemill.producer.wire.calls.transitions import PulledJob
from tests.producer.driving import Queue, delta
from tests.producer.gateway.serving import gateway, write_keys
from tests.producer.scripted_worker import scripted_worker
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config

TENANTS = ("acme-corp", "beta.org")
LARGE = 3000
"""Bytes of a payload that goes to the store."""


@dataclass
class Planted:
    """The data of one tenant."""

    tenant: str
    ids: set[str] = field(default_factory=set)
    """The text of its jobs, its files and its own batches."""
    running: list[PulledJob] = field(default_factory=list)


@dataclass
class Scene:
    queue: Queue
    store: Path
    planted: dict[str, Planted]
    mixed: str
    """A batch with jobs of both tenants."""

    def stored_files(self) -> set[str]:
        return {path.name for path in self.store.rglob("*") if path.is_file()}


def contents(queue: Queue, name: str) -> list[bytes]:
    """The complete content of a key of any type, in an order that a server's rehashing does not change."""
    key = f"{queue.prefix}{name}"
    match queue.client.type(key):
        case b"string":
            return [queue.client.get(key) or b""]
        case b"list":
            return list(queue.client.lrange(key, 0, -1))
        case b"set":
            return sorted(queue.client.smembers(key))
        case b"zset":
            return list(queue.client.zrange(key, 0, -1))
        case b"hash":
            return [part for pair in sorted(queue.client.hgetall(key).items()) for part in pair]
        case b"stream":
            return [part for _, entry in queue.client.xrange(key) for part in entry.values()]
    return []


def everything(queue: Queue) -> dict[str, list[bytes]]:
    return {name: contents(queue, name) for name in queue.names()}


def traces(queue: Queue, words: set[str]) -> list[tuple[str, str]]:
    """The locations of any of the words, in a name or in content."""
    wanted = [(word, word.encode()) for word in words]
    return [
        (name, word)
        for name, items in everything(queue).items()
        for word, text in wanted
        if text in name.encode() or any(text in item for item in items)
    ]


@contextmanager
def scene(queue: Queue, tmp_path: Path) -> Iterator[Scene]:
    """No worker and no gateway runs any more when the block is entered."""
    store = tmp_path / "store"
    planted = {tenant: Planted(tenant) for tenant in TENANTS}
    url = f"file://{store}"
    with ExitStack() as stack:
        producers = {
            tenant: stack.enter_context(
                Producer(queue.url, queue=queue.name, tenant=tenant, model="m", store=url)
            )
            for tenant in TENANTS
        }
        for producer in producers.values():
            assert producer.store is not None
            producer.store.over_bytes = LARGE // 2
        settings = {"model": "echo:0", "store_url": url, "store_over_bytes": LARGE}
        with running_worker(worker_config(queue.url, queue.name, **settings)):
            for tenant, producer in producers.items():
                _ended_in_store(producer, planted[tenant])
        queue.run(limits.set_weights(queue.name, dict.fromkeys(TENANTS, 3)))
        queue.run(quotas.set_quotas(queue.name, dict.fromkeys(TENANTS, Quota(jobs_per_day=10_000))))
        _gateway_things(queue, tmp_path, planted)
        with scripted_worker(queue.url, queue.name):
            for tenant, producer in producers.items():
                _ended(producer, planted[tenant])
            mixed = _mixed(producers, planted)
        for tenant, producer in producers.items():
            _running(queue, producer, planted[tenant])
        for tenant, producer in producers.items():
            _waiting(producer, planted[tenant])
        yield Scene(queue, store, planted, mixed)


def _wait(batch: BatchHandle) -> None:
    batch.wait(timeout=PATIENCE_S)


def _ended_in_store(producer: Producer, planted: Planted) -> None:
    large = producer.submit(prompt="x" * LARGE, model="echo", max_tokens=16, keep_input=True)
    small = producer.submit(prompt="hello", model="echo", max_tokens=3000, ignore_eos=True, stream=True)
    for handle in (large, small):
        handle.result(timeout=PATIENCE_S)
        planted.ids.add(handle.id)


def _gateway_things(queue: Queue, tmp_path: Path, planted: dict[str, Planted]) -> None:
    keys = write_keys(
        tmp_path / "keys.json",
        **{f"key{i}": {"tenant": tenant, "rate": 0.01, "burst": 100} for i, tenant in enumerate(TENANTS)},
    )
    served = gateway(queue.url, queue.name, keys_path=tmp_path / "keys.json", models=("m",))
    with scripted_worker(queue.url, queue.name), served as gate:
        for i, tenant in enumerate(TENANTS):
            with OpenAI(base_url=gate.base_url, api_key=keys[f"key{i}"], max_retries=0) as client:
                rows = [
                    {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions",
                     "body": {"model": "m", "prompt": f"p{n}"}}
                    for n in range(3)
                ]  # fmt: skip
                text = "".join(json.dumps(row) + "\n" for row in rows).encode()
                file = client.files.create(file=(f"{tenant}.jsonl", io.BytesIO(text)), purpose="batch")
                spare = client.files.create(file=("spare.jsonl", io.BytesIO(text)), purpose="batch")
                batch = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
                )
                eventually(
                    lambda batch=batch, client=client: (
                        client.batches.retrieve(batch.id).status == "completed"
                    ),
                    "its batch",
                )
                chat = client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "x"}], store=True
                )
                planted[tenant].ids |= {file.id, spare.id, batch.id, chat.id.removeprefix("chatcmpl-")}


def _ended(producer: Producer, planted: Planted) -> None:
    """Jobs that have finished in all ways, with undelivered notifications."""
    tenant = producer.tenant
    handles = [
        producer.submit(prompt="ok", webhook="https://hooks.example.com/x", metadata={"who": tenant}),
        producer.submit(prompt="fail", webhook="https://hooks.example.com/x"),
        producer.submit(prompt="die"),
        producer.submit(prompt="ok", idempotency_key="once"),
        producer.submit(prompt="ok", max_attempts=2),
    ]
    parent = producer.submit(prompt="ok", keep_input=True)
    handles += [parent, producer.submit(prompt="use {one.text}", after={"one": parent.id})]
    batch = producer.submit_many(
        [
            {"prompt": "ok", "key": "a"},
            {"prompt": "then {x.text}", "key": "b", "after": {"x": "item:a"}},
            {"prompt": "no", "temperature": -1, "metadata": {"who": tenant}},
        ],
        batch_id=f"own.{tenant}",
    )
    acked = producer.submit_many([{"prompt": "ok"}] * 3, batch_id=f"acked.{tenant}")
    for each in (batch, acked):
        _wait(each)
    items = list(acked.results())
    planted.ids |= {item.id for item in items} | {item.id for item in batch.results()}
    acked.ack(items[-1].cursor)
    planted.ids |= {batch.id, acked.id} | {handle.id for handle in handles}
    for handle in handles:
        eventually(lambda handle=handle: handle.status().state in ("succeeded", "failed", "dead"), "its end")


def _mixed(producers: dict[str, Producer], planted: dict[str, Planted]) -> str:
    first, second = TENANTS
    batch = producers[first].submit_many(
        [{"prompt": f"ok {n}", "tenant": (first, second)[n % 2], "key": str(n)} for n in range(6)],
        batch_id="of-both",
    )
    _wait(batch)
    for item in batch.results():
        planted[(first, second)[int(item.key) % 2]].ids.add(item.id)
    return batch.id


def _running(queue: Queue, producer: Producer, planted: Planted) -> None:
    """A job that runs, and a job that is to be retried; another job waits for the first one."""
    runs = producer.submit(prompt="runs", stream=True, webhook="https://hooks.example.com/x")
    tried = producer.submit(prompt="tried")
    for pulled in queue.pull(2):
        queue.checkpoint(pulled, delta(0, 1, 2, text=planted.tenant))
        if pulled.job_id == tried.id:
            queue.retry(pulled, 3600.0)
        else:
            planted.running.append(pulled)
    child = producer.submit(prompt="child", after={"one": runs.id})
    planted.ids |= {runs.id, tried.id, child.id}


def _waiting(producer: Producer, planted: Planted) -> None:
    """Jobs that wait for a worker, for their time, and for an equal job."""
    handles = [
        producer.submit(prompt="waits", metadata={"who": planted.tenant}, ttl=3600),
        producer.submit(prompt="later", delay=3600),
        *(producer.submit(prompt="equal", dedupe=True, temperature=0) for _ in range(3)),
        producer.submit(prompt="y" * LARGE),
        producer.submit(prompt="low", priority="low", model="other"),
        producer.submit(prompt="waits", idempotency_key="twice"),
    ]
    planted.ids |= {handle.id for handle in handles}
    waiting = producer.submit_many(
        [{"prompt": f"w{n}"} for n in range(5)], batch_id=f"waits.{planted.tenant}"
    )
    planted.ids.add(waiting.id)
