"""Shared by the worker's tests: a bare queue client, and workers in this process and in separate processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

from pagemill.producer.wire.calls import batches, reads, submissions, transitions
from pagemill.producer.wire.calls.reads import Outcome
from pagemill.producer.wire.calls.registry import QueueStats, WorkerInfo, set_paused, stats, workers
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import BatchCounts, JobStatus, Result
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.server.transport import SyncTransport
from pagemill.worker.config import WorkerConfig
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.worker import Worker

PATIENCE_S = 120.0
"""The longest wait of a test; generous, since the machine may be busy."""

RUN_WORKER = """
import json, sys
from pagemill.worker.config import WorkerConfig
from pagemill.worker.process import run_worker
sys.exit(run_worker(WorkerConfig.load(**json.loads(sys.argv[1]))))
"""


def eventually(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Poll until `condition()` is true; returns its value."""
    give_up = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < give_up, f"waited {patience_s:.0f} s in vain for: {what}"
        time.sleep(0.02)
    return value


class QueueClient:
    """A client that uses the wire's transitions, as any producer does; a context manager that closes it."""

    def __init__(self, url: str, queue: str) -> None:
        self.url = url
        self.queue = queue
        self.redis = open_client(url, queue, socket_timeout=30, retry=None)
        self._transport = SyncTransport(self.redis)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.redis.close()

    def run(self, call: Call[Any]) -> Any:
        """Repeat a call until it succeeds: servers crash here, and transitions may be sent twice."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._transport.run(call)
            except RedisUnavailable:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    def submit(self, *jobs: dict[str, Any], batch_id: str | None = None) -> list[str]:
        """Submit jobs for the model echo; returns their ids."""
        items = [submissions.prepare(Job.parse({"model": "echo"} | job), uuid.uuid4().hex) for job in jobs]
        return self._submit(items, batch_id)

    def submit_raw(self, payload: bytes, model: str = "echo", needs: str = "1") -> str:
        """Submit arbitrary bytes, without validation."""
        job_id = uuid.uuid4().hex
        lane = keys.lane(needs, "normal", "default", model)
        header = json.dumps({"id": job_id, "lane": lane, "cost": 1}).encode()
        return self._submit([Submission(job_id, header, payload)], None)[0]

    def _submit(self, items: Sequence[Submission], batch_id: str | None) -> list[str]:
        replies = self.run(submissions.submit(self.queue, items, batch_id=batch_id))
        assert all(reply.status == "created" for reply in replies), replies
        return [item.job_id for item in items]

    def status(self, job_id: str) -> JobStatus:
        status: JobStatus | None = self.run(reads.statuses(self.queue, [job_id]))[0]
        assert status is not None, f"no job {job_id}"
        return status

    def outcome(self, job_id: str) -> Outcome:
        outcome: Outcome = self.run(reads.outcome(self.queue, job_id))
        return outcome

    def wait(self, job_ids: Sequence[str], patience_s: float = PATIENCE_S) -> list[Outcome]:
        """Wait until all have finished."""

        def all_ended() -> bool:
            return all(self.run(reads.ends(self.queue, job_ids)))

        eventually(all_ended, f"the end of {len(job_ids)} jobs", patience_s)
        return [self.outcome(job_id) for job_id in job_ids]

    def results(self, job_ids: Sequence[str], patience_s: float = PATIENCE_S) -> list[Result]:
        """Wait until all have succeeded."""
        values = [outcome.value() for outcome in self.wait(job_ids, patience_s)]
        assert None not in values
        return [value for value in values if value is not None]

    def result(self, job_id: str) -> Result:
        return self.results([job_id])[0]

    def cancel(self, *job_ids: str) -> list[str]:
        replies: list[str] = self.run(transitions.cancel(self.queue, job_ids))
        return replies

    def counts(self, batch_id: str) -> BatchCounts:
        counts: BatchCounts = self.run(batches.counts(self.queue, batch_id))
        return counts

    def stats(self) -> QueueStats:
        return stats(self.run, self.queue)

    def workers(self) -> list[WorkerInfo]:
        reply: list[WorkerInfo] = self.run(workers(self.queue))
        return reply

    def pause(self, paused: bool = True) -> None:
        self.run(set_paused(self.queue, paused))

    def generated(self, job_id: str) -> int:
        """The number of generated tokens in the job's checkpoint."""
        return self.status(job_id).progress.generated_tokens


def worker_config(url: str, queue: str, **settings: Any) -> WorkerConfig:
    """An echo worker with its own port. Its leases outlast a busy machine: pass short ones to lose them."""
    defaults = {"model": "echo", "lease_s": 6.0, "renew_s": 0.3, "checkpoint_s": 0.1, "http_port": 0}
    return WorkerConfig.load(redis_url=url, queue=queue, **(defaults | settings))


@contextmanager
def running_worker(config: WorkerConfig, load_patience_s: float = PATIENCE_S) -> Iterator[Worker]:
    """A worker on threads of this process, known to clients; stopped at the end."""
    assert config.redis_url is not None
    worker = Worker(config, config.redis_url)
    client = QueueClient(config.redis_url, config.queue)

    def is_listed() -> bool:
        return any(each.id == worker.worker_id and each.state == "ready" for each in client.workers())

    try:
        worker.start()
        assert worker.wait_ready(timeout=load_patience_s)
        eventually(is_listed, "the worker's entry in the registry")
        yield worker
        assert worker.failure() is None
    finally:
        worker.drain(0.0, SignalFlag(), time.monotonic() + 60)
        assert worker.close()


class WorkerProcess:
    """A worker in a separate process, to be killed, frozen and drained."""

    started: ClassVar[list[WorkerProcess]] = []
    """The workers of this test and of its module's fixtures; a test kills its own at its end (tests/conftest.py)."""

    def __init__(self, config: dict[str, Any], log_path: Path) -> None:
        self.started.append(self)
        self.log_path = log_path
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN_WORKER, json.dumps(config)],
                stderr=log,
                stdout=log,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait(PATIENCE_S)

    def wait(self) -> int:
        """Its exit status."""
        return self.process.wait(PATIENCE_S)

    def log(self) -> str:
        return self.log_path.read_text()


def process_settings(url: str | None, queue: str, **settings: Any) -> dict[str, Any]:
    defaults = {
        "model": "echo:5", "max_num_seqs": 16,
        "lease_s": 1.5, "renew_s": 0.3, "checkpoint_s": 0.1, "http_port": 0,
    }  # fmt: skip
    return {"redis_url": url, "queue": queue} | defaults | settings


def get(url: str) -> tuple[int, bytes]:
    """Status and body of an HTTP response, for any status."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def get_json(url: str) -> tuple[int, dict[str, Any]]:
    status, body = get(url)
    return status, json.loads(body)
