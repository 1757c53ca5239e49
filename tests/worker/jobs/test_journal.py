"""A worker's log: one line per transition of a job, with its ids and without its prompt."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from pagemill.worker.jobs.job_counters import JobCounters
from tests.worker.harness import (
    QueueClient,
    WorkerProcess,
    eventually,
    process_settings,
    running_worker,
    worker_config,
)

SECRET = "a-prompt-that-belongs-to-its-owner"
TRANSITIONS = {"job running", "job succeeded", "job failed", "job cancelled", "job requeued"}


@pytest.fixture
def lines(client: QueueClient, valkey_url: str, tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    """Job -> its log lines, of a worker on which one job succeeded, one failed, one was cancelled, one requeued."""
    settings = process_settings(
        valkey_url, client.queue, model="echo:20", log_format="json", log_level="debug", drain_grace_s=0.0
    )
    with WorkerProcess(settings, tmp_path / "worker.log") as process:
        good, bad = client.submit({"prompt": SECRET, "max_tokens": 3}, {"prompt": SECRET * 400})
        client.wait([good, bad])
        stopped, returned = client.submit(*({"prompt": SECRET * 20, "max_tokens": 400} for _ in range(2)))
        eventually(lambda: client.generated(stopped) and client.generated(returned), "the long jobs to run")
        client.cancel(stopped)
        client.wait([stopped])
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    by_job: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for text in process.log().splitlines():
        line = json.loads(text)
        by_job[line.get("job_id", "")].append(line)
    by_job["ids"] = [{"good": good, "bad": bad, "stopped": stopped, "returned": returned}]
    return by_job


@pytest.mark.slow
def test_one_line_per_transition_with_ids_and_no_prompt(lines: dict[str, list[dict[str, Any]]]) -> None:
    (ids,) = lines.pop("ids")

    def messages(name: str) -> list[str]:
        return [line["message"] for line in lines[ids[name]] if line["message"] in TRANSITIONS]

    assert messages("good") == ["job running", "job succeeded"]
    assert messages("bad") == ["job failed"]
    assert messages("stopped") == ["job running", "job cancelled"]
    assert messages("returned") == ["job running", "job requeued"]
    for name in ids:
        for line in lines[ids[name]]:
            if line["message"] in TRANSITIONS:
                assert {"time", "level", "logger", "worker", "queue", "token", "attempt"} <= set(line)
    running, succeeded = lines[ids["good"]][:2]
    assert (running["model"], running["prompt_tokens"]) == ("echo", len(SECRET))
    assert (succeeded["outcome"], succeeded["tokens"]) == ("succeeded", 3)
    (failed,) = lines[ids["bad"]]
    assert failed["code"] == "prompt_too_long"
    assert SECRET not in json.dumps(lines)


@pytest.mark.slow
def test_a_listener_that_fails_hurts_no_job(
    client: QueueClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    for name in ("received", "started", "ended"):
        monkeypatch.setattr(JobCounters, name, broken)
    with running_worker(worker_config(client.url, client.queue)) as worker:
        ids = client.submit(*({"prompt": f"{i}", "max_tokens": 3} for i in range(20)))
        assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}
        eventually(lambda: not len(worker.table), "all leases to be let go")
    assert any("JobCounters failed" in record.getMessage() for record in caplog.records)
