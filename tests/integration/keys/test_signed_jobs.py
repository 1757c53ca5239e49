"""A worker with HMAC keys runs only signed jobs, and resumes only from checkpoints that a worker signed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from pagemill import JobFailed, Producer
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Delta, Progress
from pagemill.producer.wire.schema.signing import Keys
from pagemill.worker.config import WorkerConfig
from pagemill.worker.worker import Worker
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow

KEY, NEXT_KEY = "k" * 32, "n" * 32


@pytest.fixture
def config(valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    with monkeypatch.context() as patch:
        patch.setenv("PAGEMILL_HMAC_KEYS", f"{NEXT_KEY},{KEY}")
        config = worker_config(valkey_url, queue_name, model="echo:5")
    assert KEY not in repr(config)
    return config


@pytest.fixture
def worker(config: WorkerConfig) -> Iterator[Worker]:
    with running_worker(config) as worker:
        yield worker


def test_signed_jobs_run_and_others_fail_alone(worker: Worker, client: QueueClient) -> None:
    jobs = [
        {"prompt": f"row {i}", "model": "echo", "max_tokens": 6, "tenant": f"t{i % 3}"} for i in range(20)
    ]
    for key in (KEY, NEXT_KEY):
        with Producer(client.url, queue=client.queue, hmac_key=key) as producer:
            batch = producer.submit_many(jobs)
            single = producer.submit(prompt="single", model="echo", max_tokens=6, stream=True)
            assert batch.wait(timeout=120).succeeded == 20
            assert [event.type for event in single.stream()][-1] == "end"
            assert single.result(timeout=120).text == "single"
    for wrong in (None, "x" * 32):
        with Producer(client.url, queue=client.queue, hmac_key=wrong) as producer:
            with pytest.raises(JobFailed) as failed:
                producer.submit(prompt="p", model="echo").result(timeout=120)
            assert failed.value.code == "unsigned"


def test_a_signed_job_is_given_the_outputs_of_those_it_waited_for(
    worker: Worker, client: QueueClient
) -> None:
    with Producer(client.url, queue=client.queue, hmac_key=KEY) as producer:
        first = producer.submit(prompt="one", model="echo", max_tokens=6)
        second = producer.submit(prompt="<{a.text}>", model="echo", max_tokens=9, after={"a": first})
        assert second.result(timeout=120).text == "<one>"
    with Producer(client.url, queue=client.queue) as producer:
        unsigned = producer.submit(prompt="<{a.text}>", model="echo", max_tokens=9, after={"a": second})
        with pytest.raises(JobFailed) as failed:
            unsigned.result(timeout=120)
        assert failed.value.code == "unsigned"


def test_a_signed_payload_is_worth_nothing_elsewhere_or_changed(worker: Worker, client: QueueClient) -> None:
    envelope = Job.parse({"prompt": "p", "model": "echo"}).to_payload()
    signer = Keys([KEY])
    names = {"queue": client.queue, "job_id": "the-other-job", "tenant": "default"}
    stolen = client.submit_raw(signer.sign_payload(envelope, **names))
    changed = json.loads(signer.sign_payload(envelope, **names)) | {"prompt": "q"}
    for job_id in (stolen, client.submit_raw(json.dumps(changed, separators=(",", ":")).encode())):
        (outcome,) = client.wait([job_id])
        assert outcome.error is not None
        assert outcome.error.code == "unsigned"


@pytest.mark.parametrize("forged", [True, False])
def test_a_checkpoint_is_gone_on_from_only_if_a_worker_signed_it(
    config: WorkerConfig, client: QueueClient, forged: bool
) -> None:
    """Let another worker start after the lease expires with its checkpoint, or with a forged one."""
    prompt = "0123456789" * 5
    with running_worker(config) as first:
        fingerprint = first.engine.engine.fingerprint
    with Producer(client.url, queue=client.queue, hmac_key=KEY) as producer:
        handle = producer.submit(prompt=prompt, model="echo", max_tokens=50)
        (pulled,) = client.run(transitions.pull(client.queue, "gone", ["echo"], 1, 10**6, 60_000)).jobs
        text = "evil" if forged else prompt[:4]
        delta = Delta(index=0, offset=0, token_ids=tuple(text.encode()), text=text)
        signer = Keys(["x" * 16] if forged else [KEY])
        names = {"queue": client.queue, "job_id": handle.id, "fingerprint": fingerprint}
        call = transitions.checkpoint(
            client.queue, handle.id, pulled.token, Progress(phase="decode"), [delta], fingerprint=fingerprint,
            sign=lambda entry: signer.sign_entry(entry, **names),
        )  # fmt: skip
        assert client.run(call) == "ok"
        client.redis.zadd(f"{keys.prefix(client.queue)}leases", {handle.id: 1})
        with running_worker(config) as second:
            result = handle.result(timeout=120)
            assert result.text == prompt
            assert result.resumed_tokens == (0 if forged else 4)
            assert second.counters.regenerated_tokens.read() == (4 if forged else 0)


def test_what_a_worker_writes_is_signed(worker: Worker, client: QueueClient) -> None:
    with Producer(client.url, queue=client.queue, hmac_key=KEY) as producer:
        handle = producer.submit(prompt="0123456789" * 20, model="echo", max_tokens=200)
        entry = eventually(
            lambda: client.redis.lindex(keys.checkpoint(client.queue, handle.id), 0), "the first checkpoint"
        )
        names = {
            "queue": client.queue,
            "job_id": handle.id,
            "fingerprint": worker.engine.engine.fingerprint,
        }
        assert Keys([NEXT_KEY]).is_entry_ours(entry, **names)
        handle.cancel()
