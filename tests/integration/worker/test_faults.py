"""A worker when the engine fails a job, and when the server is unavailable or full."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pagemill.engine.outputs import RequestOutput
from pagemill.producer.wire.schema.errors import JobDead
from pagemill.worker.engine_host.messages import EngineState
from pagemill.worker.worker import Worker
from tests.conftest import RedisServer
from tests.worker.harness import (
    PATIENCE_S,
    QueueClient,
    eventually,
    get,
    get_json,
    running_worker,
    worker_config,
)

pytestmark = pytest.mark.slow

SLOW = "echo:5"
PROMPT = "0123456789" * 10


@pytest.fixture
def client(own_valkey: RedisServer, queue_name: str) -> Iterator[QueueClient]:
    with QueueClient(own_valkey.url, queue_name) as client:
        yield client


def fail_in_the_engine(worker: Worker, job_id: str, code: str) -> None:
    """Deliver the engine's output for a request whose step keeps raising."""
    job = worker.table.by_job(job_id)
    assert job is not None
    worker.engine.abort(job.request_id)
    output = RequestOutput(
        job.request_id, "decode", 100, 100, finished=True, error="the step raised", error_code=code
    )
    worker.reporter.deliver([output])


def test_a_job_that_fails_in_the_engine_is_retried_from_its_checkpoint(client: QueueClient) -> None:
    with running_worker(worker_config(client.url, client.queue, model=SLOW)) as worker:
        (job_id,) = client.submit({"prompt": PROMPT, "max_tokens": 100})
        eventually(lambda: client.generated(job_id) >= 10, "a checkpoint")
        fail_in_the_engine(worker, job_id, "engine_error")
        eventually(lambda: client.status(job_id).state != "running", "the end of the attempt")
        result = client.result(job_id)
    assert (result.text, result.attempt) == (PROMPT, 2)
    assert result.resumed_tokens >= 10
    assert client.status(job_id).crashes == 0


def test_a_job_whose_attempts_are_used_up_is_dead(client: QueueClient) -> None:
    with running_worker(worker_config(client.url, client.queue, model=SLOW)) as worker:
        (job_id,) = client.submit({"prompt": PROMPT, "max_tokens": 100, "max_attempts": 1})
        eventually(lambda: client.generated(job_id) >= 10, "a checkpoint")
        fail_in_the_engine(worker, job_id, "some_new_code")
        (outcome,) = client.wait([job_id])
    with pytest.raises(JobDead, match="the step raised") as dead:
        outcome.value()
    assert dead.value.code == "attempts_exhausted"
    assert len(dead.value.partial[0].token_ids) >= 10


@pytest.mark.parametrize("limit", [{"max_held_results": 4}, {"max_held_bytes": 3000}], ids=str)
def test_without_redis_results_are_held_up_to_a_limit_and_written_on_its_return(
    client: QueueClient, own_valkey: RedisServer, limit: dict[str, int]
) -> None:
    config = worker_config(client.url, client.queue, model=SLOW, lease_s=60.0, **limit)
    with running_worker(config) as worker:
        jobs = [{"prompt": "h" * length, "max_tokens": length} for length in range(60, 120, 6)]
        ids = client.submit(*jobs)
        eventually(lambda: sum(client.generated(job_id) > 0 for job_id in ids) == 10, "all to generate")
        own_valkey.kill()
        eventually(lambda: worker.counters.results_buffered >= 2, "results to be held")
        eventually(lambda: worker.engine.state is EngineState.HELD, "the engine to stop stepping")
        assert worker.counters.results_buffered < 10
        assert get(f"{worker.http_url}/healthz")[0] == 200
        status, ready = get_json(f"{worker.http_url}/readyz")
        assert (status, ready["redis"]) == (503, "away")
        assert b"pagemill_redis_up 0.0" in get(f"{worker.http_url}/metrics")[1]
        own_valkey.start()
        outcomes = client.wait(ids)
        assert [len(outcome.result.token_ids) for outcome in outcomes if outcome.result] == [
            *range(60, 120, 6)
        ]
        eventually(lambda: get(f"{worker.http_url}/readyz")[0] == 200, "readiness")
        assert worker.counters.commits.read()["fenced"] == 0
        assert worker.counters.redis_reconnects.read() == 1


def test_a_full_server_takes_ends_though_it_refuses_new_jobs(
    client: QueueClient, own_valkey: RedisServer
) -> None:
    with running_worker(worker_config(client.url, client.queue, model=SLOW)) as worker:
        ids = client.submit(*({"prompt": PROMPT, "max_tokens": 100, "stream": i < 2} for i in range(6)))
        eventually(lambda: all(client.generated(job_id) > 0 for job_id in ids), "all to generate")
        client.redis.config_set("maxmemory", "1mb")
        outcomes = client.wait(ids)
        assert [outcome.state for outcome in outcomes] == ["succeeded"] * 6
        client.redis.config_set("maxmemory", "0")
        (later,) = client.submit({"prompt": "later", "max_tokens": 5})
        assert client.wait([later])[0].state == "succeeded"
        assert worker.counters.leases_lost.read() == 0


def test_a_paused_server_is_away_and_comes_back(client: QueueClient) -> None:
    config = worker_config(client.url, client.queue, model=SLOW, lease_s=60.0)
    with running_worker(config) as worker:
        ids = client.submit(*({"prompt": PROMPT, "max_tokens": 100} for _ in range(4)))
        eventually(lambda: all(client.generated(job_id) > 0 for job_id in ids), "all to generate")
        client.redis.client_pause(7000, all=True)  # longer than the worker's socket timeout
        eventually(lambda: not worker.connectivity.is_up, "the worker to notice")
        time.sleep(0.1)
        outcomes = client.wait(ids)
        assert [outcome.state for outcome in outcomes] == ["succeeded"] * 4
        assert worker.counters.leases_lost.read() == 0


def test_a_step_that_hangs_renews_no_lease(client: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's threads live and could renew: they must not, or its jobs would never be taken over."""
    config = worker_config(client.url, client.queue, engine_stall_s=0.6, lease_s=1.5)
    end = threading.Event()
    hung = Worker(config, client.url)
    try:
        hung.start()
        assert hung.wait_ready(timeout=PATIENCE_S)
        executor = hung.engine.engine._parts.executor
        launch = executor.launch
        monkeypatch.setattr(executor, "launch", lambda plan: (end.wait(2 * PATIENCE_S), launch(plan))[1])
        (job_id,) = client.submit({"prompt": "taken over", "max_tokens": 10})
        eventually(lambda: (client.status(job_id).worker or "") == hung.worker_id, "the first worker to hang")
        with running_worker(worker_config(client.url, client.queue)) as rescuer:
            (outcome,) = client.wait([job_id])
            assert outcome.value().text == "taken over"  # type: ignore[union-attr]
            assert client.status(job_id).worker == rescuer.worker_id
        assert hung.leases.is_alive, "it is the engine that hangs"
        assert "got nowhere" in (hung.failure() or "")
        end.set()
        eventually(lambda: len(hung.table) == 0, "the hung worker to let go")
        assert hung.counters.jobs_finished.read()["succeeded"] == 0
    finally:
        end.set()
        hung.abandon()
        hung.close()
