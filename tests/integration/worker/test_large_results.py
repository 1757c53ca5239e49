"""Results have a limit, and the memory of a job's log-probabilities is returned."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest

from pagemill.worker.jobs import running_job
from pagemill.worker.jobs.running_job import MAX_LOGPROBS, MAX_RESULT_BYTES
from tests.worker.harness import (
    QueueClient,
    WorkerProcess,
    eventually,
    process_settings,
    running_worker,
    worker_config,
)

pytestmark = pytest.mark.slow

LOGPROBS = {"logprobs": 20, "ignore_eos": True, "temperature": 0.0}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 64, "max_tokens": 98},
        {"n": 1, "best_of": 32, "max_tokens": 200, "temperature": 1.0},
        {"prompt_logprobs": 20, "n": 3, "max_tokens": 1700},
    ],
)
def test_what_no_result_has_room_for_is_refused_before_it_runs(
    fields: dict[str, float], client: QueueClient
) -> None:
    prompt = "x" * (2300 if "prompt_logprobs" in fields else 2)
    with running_worker(worker_config(client.url, client.queue)) as worker:
        (job_id,) = client.submit({"prompt": prompt} | LOGPROBS | fields)
        (outcome,) = client.wait([job_id])
        assert worker.engine.engine.stats().requests.generated_tokens == 0
    assert outcome.error is not None
    assert outcome.error.code == "result_too_large"
    assert f"{MAX_LOGPROBS:,}" in outcome.error.message


def test_a_job_that_outgrows_a_result_ends_alone_with_what_there_is(
    client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_job, "MAX_RESULT_BYTES", 1 << 20)  # the next test reaches the real limit
    chat = {"messages": [{"role": "user", "content": "hello"}], "n": 4}
    with running_worker(worker_config(client.url, client.queue)):
        job_id, beside = client.submit(chat | LOGPROBS, {"prompt": "beside", "max_tokens": 6})
        large, small = client.wait([job_id, beside])
    assert large.error is not None
    assert (large.state, large.error.code, large.error.retryable) == ("failed", "result_too_large", False)
    assert len(large.error.partial) == 4
    assert small.result is not None
    assert client.status(job_id).attempt == 1


def test_a_result_just_below_the_bound_is_stored_whole(client: QueueClient) -> None:
    with running_worker(worker_config(client.url, client.queue)):
        (job_id,) = client.submit({"prompt": "hello", "n": 2, "max_tokens": 2330} | LOGPROBS)
        (outcome,) = client.wait([job_id])
    assert outcome.result is not None
    assert [len(output.logprobs or ()) for output in outcome.result.outputs] == [2330, 2330]
    stored = client.redis.strlen(f"pagemill:{{{client.queue}}}:out:{job_id}")
    assert MAX_RESULT_BYTES // 2 < stored <= MAX_RESULT_BYTES


def test_a_workers_memory_stays_bounded_and_returns(client: QueueClient, tmp_path: Path) -> None:
    settings = process_settings(client.url, client.queue, checkpoint_s=0.5)
    with WorkerProcess(settings, tmp_path / "worker.log") as process:
        (first,) = client.submit({"prompt": "hello", "max_tokens": 20} | LOGPROBS)
        client.wait([first])
        memory = psutil.Process(process.process.pid).memory_info
        before, peak, done = memory().rss, [0], threading.Event()

        def watch() -> None:
            while not done.is_set():
                peak[0] = max(peak[0], memory().rss)
                time.sleep(0.05)

        watcher = threading.Thread(target=watch)
        watcher.start()
        ids = client.submit(*({"prompt": f"{i}", "n": 2, "max_tokens": 2250} | LOGPROBS for i in range(6)))
        assert all(outcome.result for outcome in client.wait(ids, 300.0))
        done.set()
        watcher.join()
        assert peak[0] - before < 300 << 20
        eventually(lambda: memory().rss - before < 120 << 20, "the memory to return")
