"""Jobs whose payloads and results are outside Redis, through real servers, workers and clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagemill import AsyncProducer, InvalidJob, JobFailed, Producer, StoreError
from pagemill.producer.celery.task_message import with_result
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.wire.calls import limits, reads
from pagemill.producer.wire.calls.limits import QueueLimits
from pagemill.producer.wire.calls.outbox import Notice
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.store.store import Store
from pagemill.producer.wire.store.stub import Reference, payload_stub
from pagemill.producer.wire.webhooks.delivery import DeliveryFailed
from pagemill.worker.jobs.admission import MAX_FETCHING
from pagemill.worker.webhooks.sender import body_of
from tests.integration.storage.conftest import (
    OVER,
    TestedStore,
    deadlines,
    pass_time,
    stored_at,
    storing,
    swept,
)
from tests.producer.gateway.serving import gateway
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

LARGE = "large " * 300
"""A prompt whose job goes to the store, and whose echo does too."""
JOB: dict[str, Any] = {"prompt": LARGE, "model": "echo", "max_tokens": 1900}


@contextmanager
def producer_of(client: QueueClient, store: TestedStore | None, **options: Any) -> Iterator[Producer]:
    place = None if store is None else Store(store.url, OVER)
    with Producer(client.url, queue=client.queue, store=place, **options) as producer:
        yield producer


@pytest.mark.slow
def test_a_large_job_and_its_result_are_files_until_the_job_is_gone(
    client: QueueClient, store: TestedStore
) -> None:
    with producer_of(client, store) as producer:
        handle = producer.submit(JOB)
        small = producer.submit(prompt="small", model="echo")
        taken = stored_at(client, handle.id, "in")
        assert store.names() == {taken}
        assert deadlines(client) == {}, "it is a waiting job's"
        assert stored_at(client, small.id, "in") is None
        assert client.redis.strlen(keys.payload(client.queue, handle.id)) < 600
        with running_worker(storing(client, store)) as worker:
            assert handle.result(timeout=60).text == LARGE
            assert small.result(timeout=60).text == "small"
            given = stored_at(client, handle.id, "out")
            assert given is not None
            assert stored_at(client, small.id, "out") is None
            swept(worker, client)
            assert store.names() == {given}
            # The result lives as long as its record: a day.
            (left_s,) = (at - client.redis.time()[0] for at in deadlines(client).values())
            assert abs(left_s - client.redis.ttl(keys.outcome(client.queue, handle.id))) < 60
            pass_time(client)
            swept(worker, client)
            assert store.names() == set()
            with pytest.raises(StoreError, match="missing"):
                handle.result(timeout=60)


@pytest.mark.slow
async def test_every_reader_gets_stored_results(client: QueueClient, files: TestedStore) -> None:
    place = Store(files.url, OVER)
    with producer_of(client, files) as producer, running_worker(storing(client, files)) as worker:
        rows = [{"prompt": f"{row} {LARGE}", "model": "echo", "max_tokens": 1900} for row in range(3)]
        batch = producer.submit_many([*rows, {"prompt": "small", "model": "echo"}])
        batch.wait(timeout=60)
        wanted = [*(row["prompt"] for row in rows), "small"]
        ordered = list(batch.results(ordered=True))
        assert [item.result.text for item in ordered if item.result is not None] == wanted
        assert sorted(item.result.text for item in batch.results() if item.result is not None) == sorted(
            wanted
        )

        streamed = producer.submit(JOB, stream=True)
        events = list(streamed.stream())
        assert "".join(event.text for event in events if event.type == "token") in (LARGE, "")
        late = list(producer.job(streamed.id).stream())
        assert [(event.type, event.text) for event in late] == [("token", LARGE), ("end", "")]
        async with AsyncProducer(client.url, queue=client.queue, store=place) as other:
            again = await other.submit(JOB)
            assert (await again.result(timeout=60)).text == LARGE
            found = [item.result async for item in other.batch(batch.id).results(ordered=True)]
            assert [result.text for result in found if result is not None] == wanted

        outcome = client.outcome(again.id)
        assert (outcome.result, outcome.stored is not None) == (None, True)

        with producer_of(client, None) as poor:
            with pytest.raises(StoreError, match="no store is configured: set PAGEMILL_STORE_URL"):
                poor.job(again.id).result(timeout=60)
            with pytest.raises(StoreError, match="no store is configured"):
                list(poor.batch(batch.id).results(ordered=True))

        files.remove(stored_at(client, ordered[1].id, "out") or "")
        states = [(item.error.code if item.error else "", item.state) for item in batch.results(ordered=True)]
        assert states == [
            ("", "succeeded"),
            ("payload_lost", "succeeded"),
            ("", "succeeded"),
            ("", "succeeded"),
        ]

        # A batch's files are deleted when it is acknowledged.
        swept(worker, client)
        assert batch.ack(ordered[-1].cursor) == 4
        swept(worker, client)
        assert len(files.names()) == 2


@pytest.mark.slow
def test_celery_the_gateway_and_data_sets_read_them(
    client: QueueClient, files: TestedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_STORE_URL", files.url)
    monkeypatch.setenv("PAGEMILL_STORE_OVER_BYTES", str(OVER))
    with running_worker(storing(client, files)), gateway(client.url, client.queue) as served:
        served.wait_for("echo")
        asked = {"model": "echo", "prompt": LARGE, "max_tokens": 1900}
        answer = httpx.post(f"{served.base_url}/completions", json=asked, timeout=60).json()
        assert answer["choices"][0]["text"] == LARGE
        with httpx.stream(
            "POST", f"{served.base_url}/completions", json=asked | {"stream": True}, timeout=60
        ) as reply:
            lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == LARGE
        with Producer(client.url, queue=client.queue) as producer:
            assert isinstance(producer.store, Store)
            handle = producer.submit(JOB)
            handle.result(timeout=60)
            outcome = client.run(reads.outcome(client.queue, handle.id))
            assert outcome.stored is not None
            notice = Notice("https://example.com", 1, "default", 1.0, outcome)
            body = json.loads(body_of(client.queue, notice, producer.store))
            assert body["data"]["result"]["outputs"][0]["text"] == LARGE
            with pytest.raises(DeliveryFailed, match="this worker has none"):
                body_of(client.queue, notice)
            result = with_result(outcome).result
            assert result is not None
            assert result.text == LARGE
        rows = [{"text": f"{row} {LARGE}"} for row in range(3)]
        told: list[Any] = []
        pipeline = Pipeline("{{ text }}", model="echo", max_tokens=1900, chat=False)
        with Producer(client.url, queue=client.queue) as producer:
            pipeline.run(rows, out=tmp_path / "out.jsonl", producer=producer, on_row=told.append)
        assert [row["output"] for row in told] == [row["text"] for row in rows]


@pytest.mark.slow
def test_more_than_redis_takes_goes_through_the_store(client: QueueClient, files: TestedStore) -> None:
    huge = {"prompt": "x" * (3 << 20), "model": "echo", "truncate_prompt_tokens": 64, "max_tokens": 64}
    with producer_of(client, None) as poor, pytest.raises(ValueError, match="the limit is 1048576"):
        poor.submit(huge)
    with producer_of(client, files) as producer, running_worker(storing(client, files)):
        handle = producer.submit(huge)
        batch = producer.submit_many([huge, huge | {"prompt": "y" * (2 << 20)}])
        assert handle.result(timeout=60).text == "x" * 64
        texts = [item.result.text for item in batch.results(ordered=True) if item.result is not None]
        assert texts == ["x" * 64, "y" * 64]
        with pytest.raises(ValueError, match="the limit is"):
            producer.submit(huge | {"prompt": "x" * (65 << 20)})


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "changed", "grown", "outside", "traversal", "other tenant"])
def test_a_payload_that_is_not_to_be_had_fails_its_own_job_alone(
    client: QueueClient, files: TestedStore, damage: str, tmp_path: Any
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"v": 1, "prompt": "secret", "model": "echo"}))
    with producer_of(client, files) as producer:
        handle = producer.submit(JOB)
        uri = stored_at(client, handle.id, "in") or ""
        name = keys.payload(client.queue, handle.id)
        stub = client.redis.get(name) or b""
        match damage:
            case "missing":
                files.remove(uri)
            case "changed":
                files.write(uri, b"X" * len(json.dumps(JOB)))
            case "grown":
                files.write(uri, b"X" * (1 << 20))
            case "outside":
                client.redis.set(name, stub.replace(uri.encode(), f"file://{secret}".encode()))
            case "traversal":
                client.redis.set(name, stub.replace(uri.encode(), f"{files.url}/../secret".encode()))
            case "other tenant":
                client.redis.set(name, stub.replace(b'"tenant":"default"', b'"tenant":"other"'))
        good = producer.submit(JOB)
        with running_worker(storing(client, files)):
            with pytest.raises(JobFailed) as failed:
                handle.result(timeout=60)
            assert good.result(timeout=60).text == LARGE
    assert failed.value.code == ("unsigned" if damage == "other tenant" else "payload_lost")
    assert "secret" not in str(failed.value)
    assert str(tmp_path) not in str(failed.value)


@pytest.mark.slow
def test_a_signature_covers_the_stored_content(
    client: QueueClient, files: TestedStore, tmp_path: Any
) -> None:
    key = "k" * 32
    with (
        producer_of(client, files, hmac_key=key) as signing,
        producer_of(client, files) as plain,
        running_worker(storing(client, files, hmac_keys=key)),
    ):
        client.pause()
        good, forged, unsigned = signing.submit(JOB), signing.submit(JOB), plain.submit(JOB)
        name = keys.payload(client.queue, forged.id)
        stub = client.redis.get(name) or b""
        ours, theirs = (stored_at_signed(client, job.id) for job in (forged, unsigned))
        client.redis.set(name, stub.replace(ours.encode(), theirs.encode()))
        client.pause(paused=False)
        assert good.result(timeout=60).text == LARGE
        for bad in (forged, unsigned):
            with pytest.raises(JobFailed, match="sign") as failed:
                bad.result(timeout=60)
            assert failed.value.code == "unsigned"


def stored_at_signed(client: QueueClient, job_id: str) -> str:
    found = client.redis.get(keys.payload(client.queue, job_id)) or b""
    return str(json.loads(found)["stored"]["uri"])


@pytest.mark.slow
def test_a_worker_without_a_store_leaves_such_jobs(client: QueueClient, files: TestedStore) -> None:
    with producer_of(client, files) as producer:
        handle = producer.submit(JOB)
        with running_worker(worker_config(client.url, client.queue)):
            assert producer.submit(prompt="small", model="echo").result(timeout=60).text == "small"
            assert handle.status().state == "queued"
        with running_worker(storing(client, files)):
            assert handle.result(timeout=60).text == LARGE
    # A stub that a client puts into a lane of version 1 is not a job.
    forged = payload_stub(Reference(uri=f"{files.url}/x", sha256="0" * 64, size=1))
    job_id = client.submit_raw(forged)
    with running_worker(worker_config(client.url, client.queue)):
        (outcome,) = client.wait([job_id])
    assert outcome.error is not None
    assert outcome.error.code == "invalid_job"


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads of the store hang until this is set."""
    hangs, read = threading.Event(), Store.read

    def hanging(store: Store, reference: Reference) -> bytes:
        hangs.wait()
        return read(store, reference)

    monkeypatch.setattr(Store, "read", hanging)
    return hangs


@pytest.mark.slow
def test_a_store_that_hangs_delays_only_its_own_jobs(
    client: QueueClient, files: TestedStore, hangs: threading.Event
) -> None:
    with producer_of(client, files) as producer:
        stuck = [producer.submit(JOB, max_attempts=2) for _ in range(5)]
        with running_worker(storing(client, files, store_timeout_s=0.5)):
            others = [producer.submit(prompt=f"{row}", model="echo") for row in range(20)]
            assert [job.result(timeout=60).text for job in others] == [str(row) for row in range(20)]
            statuses = [eventually(lambda job=job: job.status().error, "a failed fetch") for job in stuck]
            assert all("did not answer within 0.5 s" in reason for reason in statuses)
            hangs.set()


@pytest.mark.slow
def test_many_jobs_whose_store_hangs_leave_room(
    client: QueueClient, files: TestedStore, hangs: threading.Event
) -> None:
    with producer_of(client, files) as producer:
        stuck = [producer.submit(JOB, priority="low") for _ in range(80)]
        with running_worker(storing(client, files, store_timeout_s=600.0)):
            eventually(lambda: any(job.status().state == "running" for job in stuck), "a fetch")
            others = [producer.submit(prompt=f"{row}", model="echo") for row in range(20)]
            assert [job.result(timeout=60).text for job in others] == [str(row) for row in range(20)]
            assert sum(job.status().state == "running" for job in stuck) <= MAX_FETCHING
            hangs.set()
            assert {job.result(timeout=60).text for job in stuck} == {LARGE}


@pytest.mark.slow
def test_where_the_store_fails_results_go_into_redis(
    client: QueueClient, files: TestedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(store: Store, uri: str, data: bytes) -> None:
        raise StoreError("the store fails with OSError", "away")

    released = threading.Event()

    def late(store: Store, uri: str, data: bytes) -> None:
        released.wait()
        write(store, uri, data)

    write = Store.write
    with producer_of(client, files) as producer:
        for broken in (failing, late):
            handle = producer.submit(JOB)
            monkeypatch.setattr(Store, "write", broken)
            with running_worker(storing(client, files, store_timeout_s=0.5)) as worker:
                with producer_of(client, None) as poor:
                    assert poor.job(handle.id).result(timeout=60).text == LARGE
                assert stored_at(client, handle.id, "out") is None
                monkeypatch.setattr(Store, "write", write)
                if broken is late:  # late content belongs to no job, and is deleted immediately
                    released.set()
                    eventually(lambda: not deadlines(client), "the discard")
                pass_time(client)
                swept(worker, client)
    assert not [uri for uri in files.names() if "/out/" in uri]


@pytest.mark.slow
def test_what_was_uploaded_for_nothing_is_deleted_within_the_hour(
    client: QueueClient, files: TestedStore
) -> None:
    with producer_of(client, files) as producer:
        first = producer.submit(JOB, idempotency_key="once")
        again = producer.submit(JOB, idempotency_key="once")
        assert again.id == first.id
        kept = stored_at(client, first.id, "in")
        (orphan,) = files.names() - {kept}
        assert set(deadlines(client)) == {orphan}
        left_s = deadlines(client)[orphan] - client.redis.time()[0]
        assert 3500 < left_s < 3601
        producer.submit(JOB, job_id=first.id)  # a submit that is repeated after a lost reply
        assert kept not in deadlines(client)
        pass_time(client)  # before the worker has uploaded a result, and not yet reported it
        with running_worker(storing(client, files)) as worker:
            swept(worker, client)
            assert first.result(timeout=60).text == LARGE


@pytest.mark.slow
def test_files_go_with_cancelled_failed_and_purged_jobs(client: QueueClient, files: TestedStore) -> None:
    with producer_of(client, files) as producer:
        cancelled, dead = producer.submit(JOB), producer.submit(JOB, max_attempts=1)
        taken = stored_at(client, cancelled.id, "in")
        cancelled.cancel()
        assert list(deadlines(client)) == [taken]
        # A store without the file, then with it: the dead letter is replayed, and its payload uploaded again.
        name = f"{keys.prefix(client.queue)}job:{dead.id}"
        client.redis.hset(name, "failures", 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "read", _out_of_reach)
            with running_worker(storing(client, files)):
                eventually(lambda: dead.status().state == "dead", "the dead letter")
        done = producer.dead_letters().replay([dead.id])
        replayed = producer.job(done.jobs[dead.id])
        assert stored_at(client, replayed.id, "in") not in (None, stored_at(client, dead.id, "in"))
        with running_worker(storing(client, files)) as worker:
            assert replayed.result(timeout=60).text == LARGE
            assert producer.dead_letters().purge([dead.id]) == 1
            pass_time(client)
            swept(worker, client)
            assert files.names() == set()


@pytest.mark.slow
def test_dead_letters_are_replayed_one_payload_at_a_time(client: QueueClient, files: TestedStore) -> None:
    seen: list[str] = []

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.append(name)
            return method(*args)

        return call

    with producer_of(client, files) as producer:
        ids = [producer.submit(JOB, max_attempts=1).id for _ in range(3)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "read", _out_of_reach)
            with running_worker(storing(client, files)):
                eventually(lambda: client.stats().dead == 3, "the dead letters")
        with pytest.MonkeyPatch.context() as patch:
            for name in ("read", "write"):
                patch.setattr(Store, name, noted(name, getattr(Store, name)))
            assert set(producer.dead_letters().replay(ids).jobs) == set(ids)
    assert seen == ["read", "write"] * 3


def test_a_queues_limit_counts_what_lies_in_the_store(client: QueueClient, files: TestedStore) -> None:
    client.run(limits.set_limits(client.queue, QueueLimits(payload_bytes=len(LARGE))))
    with producer_of(client, files) as producer:
        with pytest.raises(InvalidJob, match="bytes, more than") as caught:
            producer.submit(JOB)
        assert caught.value.code == "payload_too_large"
        client.run(limits.set_limits(client.queue, QueueLimits(payload_bytes=2 * len(LARGE))))
        assert stored_at(client, producer.submit(JOB).id, "in")


def _out_of_reach(store: Store, reference: Reference) -> bytes:
    raise StoreError("the store fails with ConnectionError", "away")


@pytest.mark.slow
def test_equal_jobs_share_a_file_until_the_last_lets_go(client: QueueClient, files: TestedStore) -> None:
    with producer_of(client, files) as producer:
        row = JOB | {"temperature": 0.0, "dedupe": True}
        batch = producer.submit_many([row] * 3)
        with running_worker(storing(client, files)) as worker:
            items = list(batch.results())
            assert [item.result.text for item in items if item.result is not None] == [LARGE] * 3
            swept(worker, client)
            assert len(files.names()) == 1
            assert batch.ack(items[1].cursor) == 2
            swept(worker, client)
            assert len(files.names()) == 1
            assert batch.ack(items[2].cursor) == 1
            swept(worker, client)
            assert files.names() == set()


@pytest.mark.slow
def test_kept_inputs_stay_and_are_verified(client: QueueClient, files: TestedStore) -> None:
    with producer_of(client, files) as producer, running_worker(storing(client, files)) as worker:
        handle = producer.submit(JOB, keep_input=True, seed=1)
        handle.result(timeout=60)
        swept(worker, client)
        assert len(files.names()) == 2
        found = producer.verify(handle.id, timeout=60)
        assert (found.exactness, found.honoured) == ("bitwise", True)
        files.remove(stored_at(client, handle.id, "out") or "")
        with pytest.raises(Exception, match="missing"):
            producer.verify(handle.id, timeout=60)


def test_no_error_holds_credentials_or_names(bucket: TestedStore, s3_endpoint: str) -> None:
    place = Store(bucket.url.replace("jobs-", "absent-"))
    reference = Reference(uri=place.new_uri("q", "in", "id"), sha256="0" * 64, size=1)
    started = time.monotonic()
    for operation in (lambda: place.read(reference), lambda: place.write(reference.uri, b"x")):
        with pytest.raises(StoreError) as failed:
            operation()
        for secret in ("AKIAEXAMPLE", "very-secret", s3_endpoint, "absent"):
            assert secret not in str(failed.value)
    assert time.monotonic() >= started
