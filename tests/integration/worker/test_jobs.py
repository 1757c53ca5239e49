"""Jobs through a real server and a worker on threads of this process, with the echo engine."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from pagemill.engine.engine import Engine
from pagemill.producer.doctor.machine_checks import http_port
from pagemill.producer.wire.calls.reads import feed
from pagemill.producer.wire.schema.errors import JobCancelled, JobExpired, JobFailed
from pagemill.producer.wire.schema.outputs import Delta
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.worker import Worker
from tests.worker.harness import (
    PATIENCE_S,
    QueueClient,
    eventually,
    get,
    get_json,
    running_worker,
    worker_config,
)

SLOW = "echo:5"


@pytest.fixture
def worker(valkey_url: str, queue_name: str, engine_host: str) -> Iterator[Worker]:
    with running_worker(worker_config(valkey_url, queue_name)) as worker:
        yield worker


@pytest.fixture
def slow_worker(valkey_url: str, queue_name: str, engine_host: str) -> Iterator[Worker]:
    with running_worker(worker_config(valkey_url, queue_name, model=SLOW)) as worker:
        yield worker


def test_a_prompt_comes_back_with_everything_a_result_holds(worker: Worker, client: QueueClient) -> None:
    (job_id,) = client.submit({"prompt": "hello", "max_tokens": 5, "seed": 11, "metadata": {"row": 1}})
    result = client.result(job_id)
    assert (result.text, result.token_ids) == ("hello", tuple(b"hello"))
    assert result.finish_reason in ("stop", "length")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 5)
    assert (result.id, result.model, result.seed, result.attempt) == (job_id, "echo", 11, 1)
    assert result.tier == worker.engine.engine.tier
    assert result.fingerprint == worker.engine.engine.fingerprint
    assert result.timing.queue_s is not None
    assert result.timing.e2e_s is not None
    assert result.timing.ttft_s is not None
    assert client.outcome(job_id).metadata == {"row": 1}
    status = client.status(job_id)
    assert (status.state, status.worker) == ("succeeded", worker.worker_id)


def test_messages_and_token_ids_are_jobs_too(worker: Worker, client: QueueClient) -> None:
    ids = client.submit(
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        {"prompt_token_ids": list(b"abc"), "max_tokens": 3},
        {"prompt": "xyz", "max_tokens": 3, "n": 2},
    )
    results = client.results(ids)
    assert [[output.text for output in result.outputs] for result in results] == [
        ["hi"],
        ["abc"],
        ["xyz", "xyz"],
    ]


def test_a_batch_of_many_jobs_adds_up_at_every_read(worker: Worker, client: QueueClient) -> None:
    ids = client.submit(*({"prompt": f"row {i}", "max_tokens": 8} for i in range(150)), batch_id="b")
    counts = client.counts("b")
    while not counts.done:
        states = counts.model_dump()
        assert sum(states[name] for name in states if name != "total") == counts.total == 150
        time.sleep(0.01)
        counts = client.counts("b")
    assert counts.succeeded == 150
    texts = [outcome.result.text for outcome in client.wait(ids) if outcome.result is not None]
    assert texts == [f"row {i}" for i in range(150)]


BAD_PAYLOADS = {
    b"\xff\xfe garbage": "invalid_job",
    b"[1, 2]": "invalid_job",
    b'{"v":1,"model":"echo"}': "invalid_job",
    b'{"v":2,"model":"echo","prompt":"a later envelope in this version\'s lane"}': "invalid_job",
    b'{"v":1,"model":"echo","prompt":"p","no_such_field":1}': "invalid_job",
    b'{"v":1,"model":"echo","prompt":"p","temperature":-1.0}': "invalid_job",
    b'{"v":1,"model":"echo","prompt":"p","temperature":NaN}': "invalid_job",
    b'{"v":1,"model":"echo","prompt":"p\\ud800"}': "invalid_job",
    b'{"v":1,"model":"echo","prompt_token_ids":[1,99999]}': "invalid_job",
    b'{"v":1,"model":"echo","prompt":"p","structured_outputs":{"regex":"("}}': "schema_invalid",
    b'{"v":1,"model":"echo","prompt":"p","structured_outputs":{"json":"{"}}': "schema_invalid",
    b'{"v":1,"model":"echo","prompt":"p","structured_outputs":{"json":"{\\"not\\":{}}"}}': "schema_mismatch",
    b'{"v":1,"model":"echo","prompt":"p","structured_outputs":{"regex":"(?=a)a"}}': "unsupported_feature",
    b'{"v":1,"model":"echo","prompt":"p","structured_outputs":{"regex":"(a?){3000}a{3000}"}}': "schema_too_complex",
    b'{"v":1,"model":"echo","prompt":"' + b"x" * 4000 + b'"}': "prompt_too_long",
    b'{"v":1,"model":"echo","prompt":"' + b"x" * 400 + b'","max_tokens":400}': "never_fits",
    b'{"v":1,"model":"echo","prompt":"' + b"x" * (1 << 20) + b'"}': "payload_too_large",
}


def test_bad_jobs_fail_alone_each_with_its_code(valkey_url: str, client: QueueClient) -> None:
    good = []
    bad = {}
    for payload, code in BAD_PAYLOADS.items():
        good += client.submit({"prompt": f"before {code}", "max_tokens": 4})
        bad[client.submit_raw(payload)] = (code, payload)
    # Space for 31 blocks of 16 tokens, and a context of 1024: a job that fits the model might not fit the pool.
    config = worker_config(valkey_url, client.queue, num_kv_blocks=32, max_model_len=1024)
    with running_worker(config):
        outcomes = client.wait([*good, *bad])
    for outcome in outcomes[: len(good)]:
        assert outcome.state == "succeeded"
    for outcome in outcomes[len(good) :]:
        code, payload = bad[outcome.job_id]
        with pytest.raises(JobFailed) as failure:
            outcome.value()
        assert failure.value.code == code, payload[:80]
        assert not failure.value.retryable
        assert "xxxx" not in failure.value.message


@pytest.mark.slow
def test_a_job_with_unknown_needs_is_left_for_later_workers(worker: Worker, client: QueueClient) -> None:
    later = client.submit_raw(b'{"v":99,"from":"the future"}', needs="99")
    client.wait(client.submit({"prompt": "now", "max_tokens": 3}))
    assert client.status(later).state == "queued"


@pytest.mark.slow
def test_a_job_for_another_model_waits_and_says_why(worker: Worker, client: QueueClient) -> None:
    (other,) = client.submit({"prompt": "p", "model": "nobody-serves-this"})
    client.wait(client.submit({"prompt": "mine", "max_tokens": 4}))
    status = client.status(other)
    assert status.state == "queued"
    assert "no live worker serves it" in (status.error or "")


def test_cancelling_a_running_job_keeps_the_partial_and_frees_its_blocks(
    slow_worker: Worker, client: QueueClient
) -> None:
    (job_id,) = client.submit({"prompt": "c" * 2000, "max_tokens": 2000})
    eventually(lambda: client.generated(job_id) > 0, "the first tokens")
    assert client.cancel(job_id) == ["requested"]
    (outcome,) = client.wait([job_id])
    with pytest.raises(JobCancelled) as cancelled:
        outcome.value()
    (partial,) = cancelled.value.partial
    assert 0 < len(partial.token_ids) < 2000
    assert partial.text == "c" * len(partial.token_ids)
    eventually(lambda: slow_worker.engine.stats.kv.active_blocks == 0, "the blocks coming back")
    eventually(lambda: not slow_worker.table.leases(), "the end of its lease")


@pytest.mark.slow
def test_deadline_and_timeout_end_a_running_job(slow_worker: Worker, client: QueueClient) -> None:
    long = {"prompt": "c" * 2000, "max_tokens": 2000}
    ids = client.submit(long | {"ttl": 3.0}, long | {"timeout": 0.4})
    for outcome, reason in zip(client.wait(ids), ("deadline", "timeout of 0.4 s"), strict=True):
        with pytest.raises(JobExpired, match=reason) as expired:
            outcome.value()
        assert expired.value.code == "deadline_exceeded"
        assert expired.value.partial


def test_progress_only_ever_grows(slow_worker: Worker, client: QueueClient) -> None:
    text = "the quick brown fox " * 10
    (job_id,) = client.submit({"prompt": text, "max_tokens": 200, "stream": True})
    progress = []

    def ended() -> bool:
        status = client.status(job_id)
        progress.append(status.progress)
        return status.done

    eventually(ended, "the end of the job")
    generated = [step.generated_tokens for step in progress]
    assert generated == sorted(generated)
    assert len(set(generated)) > 5
    assert {step.phase for step in progress} >= {"decode"}
    assert all(step.prompt_tokens in (0, 200) and step.max_tokens in (0, 200) for step in progress)
    blocks = [step.kv_blocks for step in progress]
    capacity = slow_worker.engine.capacity
    assert capacity is not None
    held = [capacity.blocks_for(200 + step.generated_tokens) for step in progress]
    assert {*blocks} <= {0, *held}
    assert max(blocks) > capacity.blocks_for(200)
    assert blocks[-1] == 0
    (outcome,) = client.wait([job_id])
    assert outcome.result is not None
    assert outcome.result.text == text


def test_tokens_reach_the_feed_in_order_and_without_gaps(slow_worker: Worker, client: QueueClient) -> None:
    (job_id,) = client.submit({"prompt": "a" * 150, "max_tokens": 150, "stream": True})
    deltas: list[Delta] = []

    def ended() -> bool:
        news = client.run(feed(client.queue, job_id, 0, len(deltas)))
        deltas.extend(news.deltas)
        return news.state == "succeeded"

    eventually(ended, "the end of the stream")
    offset = 0
    for delta in deltas:
        assert delta.offset == offset
        offset += len(delta.token_ids)
    assert len(deltas) > 3


@pytest.mark.slow
def test_a_full_pool_stops_the_pulling_and_says_why(valkey_url: str, client: QueueClient) -> None:
    # Each job needs 13 of 39 blocks: three run, the rest stays visible to other workers.
    config = worker_config(valkey_url, client.queue, model=SLOW, num_kv_blocks=41, max_num_seqs=16)
    with running_worker(config) as worker:
        client.pause()
        ids = client.submit(*({"prompt_token_ids": [7] * 100, "max_tokens": 100} for _ in range(12)))
        client.pause(False)
        eventually(lambda: worker.admission.blocked == "kv", "the pool to fill up")
        assert client.stats().counts["running"] <= 3
        assert get_json(f"{worker.http_url}/readyz")[1]["admission_blocked"] == "kv"
        assert all(outcome.state == "succeeded" for outcome in client.wait(ids))
        assert worker.engine.stats.scheduler.preemptions == 0


@pytest.mark.slow
def test_a_job_that_costs_more_than_its_guess_still_runs_alone(valkey_url: str, client: QueueClient) -> None:
    with running_worker(worker_config(valkey_url, client.queue, num_kv_blocks=16)):
        ids = client.submit(*({"prompt": "p" * 100, "max_tokens": 120} for _ in range(5)))
        assert all(outcome.state == "succeeded" for outcome in client.wait(ids))


def test_paused_means_no_pulls_and_running_jobs_finish(slow_worker: Worker, client: QueueClient) -> None:
    (running,) = client.submit({"prompt": "r" * 100, "max_tokens": 100})
    eventually(lambda: client.status(running).state == "running", "the first job to run")
    client.pause()
    (waiting,) = client.submit({"prompt": "waits", "max_tokens": 5})
    client.wait([running])
    eventually(lambda: slow_worker.admission.blocked == "paused", "the worker to notice")
    assert client.status(waiting).state == "queued"
    client.pause(False)
    assert client.wait([waiting])[0].state == "succeeded"


def test_status_pages_and_metrics(worker: Worker, client: QueueClient, engine_host: str) -> None:
    client.wait(client.submit(*({"prompt": "m", "max_tokens": 1} for _ in range(3))))
    assert get(f"{worker.http_url}/healthz")[0] == 200
    status, ready = get_json(f"{worker.http_url}/readyz")
    assert status == 200
    assert (ready["state"], ready["model"], ready["redis"]) == ("ready", "echo", "up")
    assert ready["tier"] == worker.engine.engine.tier
    assert ("engine_pid" in ready) == (engine_host == "process")
    told = http_port(urlsplit(worker.http_url or "").port or 0).message
    assert ("engine in process" in told) == (engine_host == "process")
    metrics = get(f"{worker.http_url}/metrics")[1].decode()
    assert 'pagemill_jobs_finished_total{outcome="succeeded"} 3.0' in metrics
    blocks = re.findall(r"^pagemill_kv_cache_blocks\{.*\} (\S+)$", metrics, re.MULTILINE)
    capacity = re.findall(r"^pagemill_kv_cache_capacity_blocks(?:\{.*\})? (\S+)$", metrics, re.MULTILINE)
    assert len(blocks) > 1
    assert sum(map(float, blocks)) == float(capacity[0]) > 0
    assert "pagemill_redis_up 1.0" in metrics
    (info,) = eventually(
        lambda: [w for w in client.workers() if w.models], "the heartbeat that names the model"
    )
    assert (info.id, info.url, info.models) == (worker.worker_id, worker.http_url, ("echo",))


@pytest.mark.slow
def test_a_checkpoint_of_the_same_engine_is_resumed_and_another_is_not(client: QueueClient) -> None:
    prompt = "0123456789" * 20
    ids = client.submit(*({"prompt": prompt, "max_tokens": 200} for _ in range(2)))
    with running_worker(worker_config(client.url, client.queue, model=SLOW)):
        for job_id in ids:
            eventually(lambda job_id=job_id: client.generated(job_id) >= 20, "a checkpoint")
    assert [client.status(job_id).state for job_id in ids] == ["queued", "queued"]
    # As if the second job had been checkpointed by an engine with other weights.
    client.redis.hset(f"pagemill:{{{client.queue}}}:job:{ids[1]}", "fingerprint", "other-weights")
    with running_worker(worker_config(client.url, client.queue, model=SLOW)):
        resumed, restarted = client.results(ids)
    assert resumed.text == restarted.text == prompt
    assert resumed.resumed_tokens >= 20
    assert restarted.resumed_tokens == 0
    assert [client.status(job_id).crashes for job_id in ids] == [0, 0]


@pytest.mark.slow
def test_no_prompt_and_no_output_reaches_the_log(
    worker: Worker, client: QueueClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    secret = "a-secret-nobody-may-log"
    ids = client.submit({"prompt": secret, "max_tokens": 30})
    ids.append(client.submit_raw(json.dumps({"v": 1, "model": "echo", "prompt": secret, "n": "x"}).encode()))
    client.wait(ids)
    assert secret not in caplog.text
    assert secret not in str([vars(record) for record in caplog.records])
    assert set(ids) <= {getattr(record, "job_id", None) for record in caplog.records}


@pytest.mark.slow
def test_a_worker_names_its_model_when_it_is_ready_not_with_its_next_renewal(
    client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = threading.Event()
    load: Callable[..., Engine] = Engine.from_config
    monkeypatch.setattr(Engine, "from_config", lambda config: (may_load.wait(PATIENCE_S), load(config))[1])
    config = worker_config(client.url, client.queue, renew_s=300.0, lease_s=600.0)
    assert config.redis_url is not None
    worker = Worker(config, config.redis_url)
    try:
        worker.start()
        (loading,) = eventually(client.workers, "the first heartbeat")
        assert (loading.models, loading.state) == ((), "loading")
        may_load.set()
        assert worker.wait_ready(timeout=PATIENCE_S)
        eventually(
            lambda: [w.models for w in client.workers() if w.state == "ready"] == [("echo",)],
            "the model's name",
            patience_s=9.0,  # shorter than the lifetime of an entry without a heartbeat
        )
        worker.drain(0.0, SignalFlag(), time.monotonic() + 20)
        eventually(lambda: [w.state for w in client.workers()] == ["draining"], "the drain", patience_s=9.0)
    finally:
        may_load.set()
        assert worker.close()
