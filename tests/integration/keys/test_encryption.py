"""Encryption at rest: prompts and outputs are unreadable in Redis and the store, and all requests work."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI, omit

from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import outbox, transitions
from pagemill.producer.wire.calls.gateway import stored_files
from pagemill.producer.wire.calls.gateway.stored_files import StoredFile
from pagemill.producer.wire.schema.checkpoints import read_deltas
from pagemill.producer.wire.schema.errors import InvalidJob, JobFailed
from pagemill.producer.wire.schema.sealing import (
    COMMAND_VARIABLE,
    KEYS_VARIABLE,
    REQUIRED_VARIABLE,
    KeyRing,
    SealedError,
    ring,
)
from pagemill.producer.wire.schema.signing import unsigned_entry
from pagemill.producer.wire.webhooks.delivery import DeliveryFailed
from pagemill.worker.webhooks.sender import body_of
from pagemill.worker.worker import Worker
from tests.producer.driving import Queue, delta, open_queue, result_json
from tests.producer.gateway.serving import gateway
from tests.worker.harness import (
    PATIENCE_S,
    WorkerProcess,
    eventually,
    process_settings,
    running_worker,
    worker_config,
)

SENTINEL = "zebra-quagga-okapi"
MODEL = "echo"
FILE = StoredFile("file-1", 0.0, 30, 1, "in.jsonl", "batch", 0)


def key() -> str:
    return base64.b64encode(os.urandom(32)).decode()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> str:
    value = f"k1:{key()}"
    monkeypatch.setenv(KEYS_VARIABLE, value)
    return value


@pytest.fixture
def queue(valkey_url: str, queue_name: str) -> Iterator[Queue]:
    with open_queue(valkey_url, queue_name) as queue:
        yield queue


def readable(queue: Queue, *words: str) -> list[str]:
    """The keys whose serialized form, as in a dump of the server, contains one of the words."""
    return [
        name
        for name in queue.names()
        if any(word.encode() in (queue.client.dump(f"{queue.prefix}{name}") or b"") for word in words)
        or any(word.encode() in item for item in _items(queue, name) for word in words)
    ]


def _items(queue: Queue, name: str) -> list[bytes]:
    key = f"{queue.prefix}{name}"
    match queue.client.type(key):
        case b"string":
            return [queue.client.get(key) or b""]
        case b"list":
            return list(queue.client.lrange(key, 0, -1))
        case b"hash":
            return list(queue.client.hgetall(key).values())
    return []


def entries(queue: Queue, job_id: str) -> list[bytes]:
    return [unsigned_entry(entry) for entry in queue.client.lrange(f"{queue.prefix}ckpt:{job_id}", 0, -1)]


@pytest.mark.slow
def test_nothing_is_readable_and_everything_answers(queue: Queue, keys: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    config = worker_config(queue.url, queue.name, model="echo:2", store_url=url, store_over_bytes=2000)
    with Producer(queue.url, queue=queue.name, model=MODEL, store=url) as producer:
        assert producer.store is not None
        producer.store.over_bytes = 2000
        twice = {"prompt": f"{SENTINEL} twice", "dedupe": True, "temperature": 0, "max_tokens": 30}
        equal = [producer.submit(twice) for _ in range(3)]
        about, large_about = {"about": SENTINEL}, {"about": SENTINEL, "more": "x" * 16_000}
        before = producer.submit(prompt=f"{SENTINEL} waits", max_tokens=40, keep_input=True, metadata=about)
        large = producer.submit(prompt=f"{SENTINEL} " * 150, max_tokens=1000, keep_input=True)
        assert readable(queue, SENTINEL) == []
        with running_worker(config):
            chat = producer.submit(messages=[{"role": "user", "content": SENTINEL}], max_tokens=60)
            stream = producer.submit(prompt=f"{SENTINEL} streams", max_tokens=40, stream=True)
            text = "".join(event.text for event in stream.stream() if event.type in ("token", "snapshot"))
            assert SENTINEL in text
            child = producer.submit(prompt="after: {one.text}", after={"one": before.id}, max_tokens=60)
            late = producer.submit(prompt="after: {one.text}", after={"one": equal[2].id}, max_tokens=60)
            for handle in (*equal, before, large, chat, child, late):
                assert SENTINEL in handle.result(timeout=PATIENCE_S).text, handle.id
            assert before.status().metadata == before.result(timeout=0).metadata == about
            rows = [
                {"prompt": f"{SENTINEL} {n}", "max_tokens": 30, "metadata": large_about} for n in range(3)
            ]
            invalid = {"prompt": "", "metadata": large_about}
            batch = producer.submit_many([*rows, invalid], on_invalid="record")
            batch.wait(timeout=PATIENCE_S)
            items = list(batch.results())
            assert [item.metadata for item in items] == [large_about] * 4
            texts = [item.result.text for item in items if item.result is not None]
            assert [SENTINEL in text for text in texts] == [True] * 3
            assert producer.verify(before.id, timeout=PATIENCE_S).is_reproduced
        assert [event.type for event in stream.stream()][-1] == "end"
        assert readable(queue, SENTINEL, SENTINEL[:12]) == []
        files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
        assert files
        assert not [path for path in files if SENTINEL.encode() in path.read_bytes()]
        assert all(path.read_bytes().startswith(b'{"sealed":"k1"') for path in files)


@pytest.mark.slow
def test_a_sealed_checkpoint_is_taken_over(queue: Queue, keys: str, tmp_path: Path) -> None:
    settings = process_settings(queue.url, queue.name, model="echo:20", lease_s=1.0, checkpoint_s=0.05)
    with Producer(queue.url, queue=queue.name, model=MODEL) as producer:
        handle = producer.submit(prompt=f"{SENTINEL} goes on", max_tokens=150, ignore_eos=True, stream=True)
        with WorkerProcess(settings, tmp_path / "first.log"):
            eventually(lambda: len(entries(queue, handle.id)) > 3, "a checkpoint")
        saved = entries(queue, handle.id)
        assert all(entry.startswith(b'{"sealed":"k1"') for entry in saved)
        assert readable(queue, SENTINEL, "zebra") == []
        before = handle.status().progress.generated_tokens
        assert before > 0
        with running_worker(worker_config(queue.url, queue.name, model="echo:0")) as worker:
            result = handle.result(timeout=PATIENCE_S)
            assert worker.counters.regenerated_tokens.read() == 0
        assert SENTINEL in result.text
        assert len(result.outputs[0].token_ids) == 150


def test_a_dead_letter_is_shown_and_replayed(queue: Queue, keys: str) -> None:
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        handle = producer.submit(prompt=SENTINEL, metadata={"about": SENTINEL})
        queue.fail(queue.pull_one(), "dead")
        letter = producer.dead_letters().show(handle.id)
        assert [found.metadata for found in producer.dead_letters().list()] == [{"about": SENTINEL}]
        assert SENTINEL.encode() not in letter.payload
        done = producer.dead_letters().replay([handle.id])
        assert list(done.jobs) == [handle.id]
        assert readable(queue, SENTINEL) == []
        pulled = queue.pull_one()
        assert pulled.job_id == done.jobs[handle.id]
        assert SENTINEL.encode() in ring().open(pulled.payload, "job", pulled.job_id)


def test_files_of_the_gateway(queue: Queue, keys: str) -> None:
    file = FILE
    queue.run(stored_files.begin(queue.name, "t", file, max_files=9, max_bytes=999))
    queue.run(stored_files.write(queue.name, "t", file.id, 0, SENTINEL.encode()))
    queue.run(stored_files.finish(queue.name, "t", file.id, 60.0))
    assert readable(queue, SENTINEL) == []
    assert queue.run(stored_files.read(queue.name, file.id, 0)) == SENTINEL.encode()


@pytest.mark.slow
def test_what_the_gateway_stores_of_requests(
    queue: Queue, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REQUIRED_VARIABLE, "1")
    about = {"about": SENTINEL}
    form: dict[str, Any] = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [SENTINEL]}}}
    line = {"custom_id": "a", "body": {"model": MODEL, "prompt": SENTINEL}}
    worker = running_worker(worker_config(queue.url, queue.name, model=MODEL))
    with (
        worker,
        gateway(queue.url, queue.name) as served,
        OpenAI(base_url=served.base_url, api_key="none") as client,
    ):
        asked: dict[str, Any] = {"model": MODEL, "input": SENTINEL, "metadata": about, "text": form}
        first = client.responses.create(**asked, instructions=SENTINEL, background=True)
        done = eventually(
            lambda: (found := client.responses.retrieve(first.id)).status == "completed" and found, "it"
        )
        assert (done.metadata, done.text.format.schema_) == (about, {"enum": [SENTINEL]})
        after = client.responses.create(**asked, store=True, previous_response_id=first.id)
        assert SENTINEL in after.output_text
        chats = client.chat.completions
        chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": SENTINEL}]}
        stored = [chats.create(**chat, store=True, metadata=about).id for _ in range(2)]
        chats.update(stored[0], metadata={"now": SENTINEL})
        assert [found.id for found in chats.list(metadata=about)] == [stored[1]]
        assert [found.id for found in chats.list(metadata={"now": SENTINEL})] == [stored[0]]
        assert [message.content for message in chats.messages.list(stored[0])] == [SENTINEL]
        batch = client.batches.create(
            input_file_id=omit,  # type: ignore[arg-type]
            endpoint="/v1/completions",
            completion_window="24h",
            metadata=about,
            extra_body={"requests": [line]},
        )
        assert eventually(lambda: client.batches.retrieve(batch.id).output_file_id, "its output")
        assert client.batches.retrieve(batch.id).metadata == about
        assert readable(queue, SENTINEL, SENTINEL[:12]) == []
        monkeypatch.setenv(KEYS_VARIABLE, f"k9:{key()}")
        assert client.batches.retrieve(batch.id).metadata is None
        for read in (lambda: client.responses.retrieve(first.id), lambda: chats.retrieve(stored[0])):
            with pytest.raises(APIStatusError):
                read()
        assert list(chats.list()) == []


@pytest.mark.slow
def test_keys_are_rotated_and_an_unknown_one_fails_its_job_alone(
    queue: Queue, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(queue.url, queue=queue.name, model=MODEL) as old:
        first = old.submit(prompt=f"{SENTINEL} first", max_tokens=30)
    monkeypatch.delenv(KEYS_VARIABLE)
    with Producer(queue.url, queue=queue.name, model=MODEL) as plain:
        clear = plain.submit(prompt="clear", max_tokens=10)
    monkeypatch.setenv(KEYS_VARIABLE, f"k9:{key()}")
    with Producer(queue.url, queue=queue.name, model=MODEL) as stranger:
        lost = stranger.submit(prompt="lost", max_tokens=10)
    rotated = f"k2:{key()},{keys}"
    monkeypatch.setenv(KEYS_VARIABLE, rotated)
    with (
        Producer(queue.url, queue=queue.name) as producer,
        running_worker(worker_config(queue.url, queue.name, model="echo:0")),
    ):
        assert SENTINEL in producer.job(first.id).result(timeout=PATIENCE_S).text
        assert "clear" in producer.job(clear.id).result(timeout=PATIENCE_S).text
        with pytest.raises(JobFailed, match=r"k9.*add it to") as refused:
            producer.job(lost.id).result(timeout=PATIENCE_S)
        assert refused.value.code == "sealed"
    assert (queue.client.get(f"{queue.prefix}out:{first.id}") or b"").startswith(b'{"sealed":"k2"')
    monkeypatch.setenv(KEYS_VARIABLE, keys)
    with Producer(queue.url, queue=queue.name) as late, pytest.raises(SealedError, match="k2"):
        late.job(first.id).result(timeout=0)
    monkeypatch.setenv(KEYS_VARIABLE, rotated)
    monkeypatch.setenv(REQUIRED_VARIABLE, "1")
    queue.submit("plain", model=MODEL)
    with (
        Producer(queue.url, queue=queue.name) as producer,
        running_worker(worker_config(queue.url, queue.name, model="echo:0")),
        pytest.raises(JobFailed, match="not encrypted"),
    ):
        producer.job("plain").result(timeout=PATIENCE_S)


def test_a_webhook_waits_for_a_worker_that_has_the_key(
    queue: Queue, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a rotation, a worker without the key may claim the event: it must not report a success without result."""
    queue.submit("told", webhook="https://example.com/hook")
    pulled = queue.pull_one()
    sealed = ring().seal(result_json("told", SENTINEL).encode(), "result", "told").decode()
    queue.run(transitions.commit(queue.name, "told", pulled.token, "succeeded", sealed))
    monkeypatch.setenv(KEYS_VARIABLE, f"k9:{key()}")
    (notice,) = queue.run(outbox.claim(queue.name, 1, 1))
    with pytest.raises(DeliveryFailed, match=f"k1.*add it to {KEYS_VARIABLE}"):
        body_of(queue.name, notice)
    queue.run(outbox.finish_delivery(queue.name, "told", notice.tries, 1))
    monkeypatch.setenv(KEYS_VARIABLE, keys)
    (notice,) = eventually(lambda: queue.run(outbox.claim(queue.name, 1, 1)), "the notice")
    assert SENTINEL in body_of(queue.name, notice).decode()


@pytest.mark.slow
def test_a_checkpoint_whose_key_is_gone_is_begun_again(
    queue: Queue, keys: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The producer encrypted the job with a key that stays; the worker its checkpoint with one that is removed."""
    with Producer(queue.url, queue=queue.name, model=MODEL) as producer:
        handle = producer.submit(prompt=f"{SENTINEL} goes on", max_tokens=150, ignore_eos=True, stream=True)
        monkeypatch.setenv(KEYS_VARIABLE, f"k2:{key()},{keys}")
        settings = process_settings(queue.url, queue.name, model="echo:20", lease_s=1.0, checkpoint_s=0.05)
        with WorkerProcess(settings, tmp_path / "first.log"):
            eventually(lambda: len(entries(queue, handle.id)) > 3, "a checkpoint")
        assert all(entry.startswith(b'{"sealed":"k2"') for entry in entries(queue, handle.id))
        monkeypatch.setenv(KEYS_VARIABLE, keys)
        with running_worker(worker_config(queue.url, queue.name, model="echo:0")) as worker:
            result = handle.result(timeout=PATIENCE_S)
            assert worker.counters.resumed_tokens.read() == 0
        assert SENTINEL in result.text
        assert len(result.outputs[0].token_ids) == 150
        assert all(entry.startswith(b'{"sealed":"k1"') for entry in entries(queue, handle.id))


def test_keys_change_while_a_stream_is_read(queue: Queue, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rotated = f"k2:{key()},{keys}"
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        handle = producer.submit(prompt=SENTINEL, max_tokens=9, stream=True)
        monkeypatch.setenv(KEYS_VARIABLE, rotated)
        events = handle.stream()
        for worker, ring_of in (("w1", rotated), ("w2", keys), ("w3", rotated)):
            monkeypatch.setenv(KEYS_VARIABLE, ring_of)
            pulled = queue.pull_one(worker=worker)
            offset = 2 * int(worker[1:]) - 2
            sealing = ring()

            def sign(entry: bytes, sealing: KeyRing = sealing) -> bytes:
                return sealing.seal(entry, "delta", handle.id)

            assert queue.checkpoint(pulled, delta(offset, 1, 2, text=worker), sign=sign) == "ok"
            monkeypatch.setenv(KEYS_VARIABLE, rotated)
            assert worker in next(event.text for event in events if event.type in ("token", "snapshot"))
            if worker != "w3":
                assert queue.release(pulled) == "released"
        assert len({entry[:14] for entry in entries(queue, handle.id)}) == 2
        queue.commit(pulled)
        assert [event.type for event in events][-1] == "end"


def test_a_letter_without_its_key_is_refused_alone(
    queue: Queue, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        lost = producer.submit(prompt=SENTINEL)
    rotated = f"k2:{key()}"
    monkeypatch.setenv(KEYS_VARIABLE, rotated)
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        found = producer.submit(prompt=SENTINEL)
        for pulled in queue.pull():
            queue.checkpoint(pulled, delta(0, 1))
            queue.fail(pulled, "dead")
        letters = producer.dead_letters()
        assert {letter.id for letter in letters.list()} == {lost.id, found.id}
        assert letters.show(lost.id).letter.id == lost.id
        done = letters.replay()
        assert list(done.jobs) == [found.id]
        assert "k1" in done.refused[lost.id]


def test_values_cannot_be_swapped(keys: str) -> None:
    one = ring()
    sealed = one.seal(b"text", "result", "a")
    assert one.seal(b"text", "result", "a") == sealed, "a call that is sent twice writes the same"
    assert one.open(sealed, "result", "a") == b"text"
    for kind, name in (("result", "b"), ("job", "a"), ("delta", "a")):
        with pytest.raises(SealedError, match="not what was written"):
            one.open(sealed, kind, name)  # type: ignore[arg-type]
    document = json.loads(sealed)
    data = bytearray(base64.b64decode(document["data"]))
    data[-1] ^= 1
    changed = b'{"sealed":"k1","data":"%b"}' % base64.b64encode(bytes(data))
    with pytest.raises(SealedError):
        one.open(changed, "result", "a")
    with pytest.raises(SealedError, match="damaged"):
        one.open(sealed[:-9], "result", "a")


def test_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert not ring()
    assert ring().seal(b"{}", "job", "a") == b"{}"
    (tmp_path / "keys").write_text(f"a:{key()}\nb:{key()}\n")
    monkeypatch.setenv(COMMAND_VARIABLE, f"cat {tmp_path / 'keys'}")
    assert repr(ring()) == "KeyRing(a, b)"
    for command in ("false", "true", "/no/such/program"):
        monkeypatch.setenv(COMMAND_VARIABLE, command)
        with pytest.raises(InvalidJob, match="command"):
            ring()
    monkeypatch.delenv(COMMAND_VARIABLE)
    for bad in ("k1:short", "nokey", "k1:" + key()[:-4]):
        monkeypatch.setenv(KEYS_VARIABLE, bad)
        with pytest.raises(InvalidJob, match="number 1") as error:
            ring()
        assert bad not in str(error.value)
    monkeypatch.delenv(KEYS_VARIABLE)
    monkeypatch.setenv(REQUIRED_VARIABLE, "1")
    with pytest.raises(InvalidJob, match="no key"):
        ring()
    assert not KeyRing({})


def test_results_and_checkpoints_in_clear_are_refused_where_encryption_is_required(
    queue: Queue, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the key, or with a forged checkpoint, a worker must not read it: the job restarts from the prompt."""
    for name in ("ended", "begun"):
        queue.submit(name)
    ended, begun = queue.pull_one(), queue.pull_one()
    queue.commit(ended)
    queue.checkpoint(begun, delta(0, 7, 8))
    queue.run(stored_files.begin(queue.name, "t", FILE, max_files=9, max_bytes=999))
    monkeypatch.delenv(KEYS_VARIABLE)
    queue.run(stored_files.write(queue.name, "t", FILE.id, 0, b"forged"))
    monkeypatch.setenv(KEYS_VARIABLE, keys)

    def readers(producer: Producer) -> list[Callable[[], object]]:
        return [
            lambda: producer.job("ended").result(timeout=0),
            lambda: read_deltas("begun", entries(queue, "begun")),
            lambda: queue.run(stored_files.read(queue.name, FILE.id, 0)),
        ]

    with Producer(queue.url, queue=queue.name) as producer:
        assert all(read() for read in readers(producer))
        monkeypatch.setenv(REQUIRED_VARIABLE, "1")
        for read in readers(producer):
            with pytest.raises(SealedError, match="not encrypted"):
                read()


def test_a_worker_does_not_start_without_the_key_that_is_required(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    monkeypatch.setenv(REQUIRED_VARIABLE, "1")
    with pytest.raises(InvalidJob, match=f"{REQUIRED_VARIABLE} is set, and {KEYS_VARIABLE} has no key"):
        Worker(worker_config(queue.url, queue.name, model=MODEL), queue.url)


def test_conditions_are_refused(queue: Queue, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Producer(queue.url, queue=queue.name, model="m") as producer:
        parent = producer.submit(prompt="x")
        with pytest.raises(InvalidJob, match="while they are encrypted"):
            producer.submit(prompt="y", after={"one": parent.id}, when={"one": {"text": "ok"}})
        producer.submit(prompt="y", after={"one": parent.id})


@pytest.mark.slow
def test_a_batch_through_the_gateway(queue: Queue, keys: str) -> None:
    rows = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions",
         "body": {"model": MODEL, "prompt": f"{SENTINEL} {n}", "max_tokens": 30}}
        for n in range(3)
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    worker = running_worker(worker_config(queue.url, queue.name, model="echo:0"))
    with worker, gateway(queue.url, queue.name) as served:
        served.wait_for(MODEL)
        with OpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
            file = client.files.create(file=("in.jsonl", io.BytesIO(text)), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch's end")
            output = client.batches.retrieve(batch.id).output_file_id
            assert output is not None
            assert client.files.content(output).text.count(SENTINEL) == 3
            assert client.files.content(file.id).content == text
            streamed = client.completions.create(model=MODEL, prompt=SENTINEL, max_tokens=30, stream=True)
            assert SENTINEL in "".join(part.choices[0].text for part in streamed if part.choices)
    assert readable(queue, SENTINEL) == []


@pytest.mark.slow
def test_probabilities_of_labels_are_sealed(queue: Queue, keys: str) -> None:
    labels = ["zebra", "okapi"]
    config = worker_config(
        queue.url, queue.name, model="smollm2", kv_cache_memory_bytes=128 << 20, num_threads=1
    )
    with running_worker(config, load_patience_s=400), Producer(queue.url, queue=queue.name) as producer:
        handle = producer.submit(
            prompt=f"{SENTINEL} is a",
            model="smollm2",
            structured_outputs={"choice": labels},
            label_probs="product",
        )
        after = producer.submit(
            prompt="{one.label} {one.prob}", model="smollm2", max_tokens=4, after={"one": handle.id}
        )
        found = handle.result(timeout=400).outputs[0]
        assert found.label in labels
        assert after.result(timeout=400).text is not None
    assert readable(queue, SENTINEL, *labels) == []
