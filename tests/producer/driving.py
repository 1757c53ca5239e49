"""A queue for manual control: shorthands for its transitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeVar

import redis

from pagemill.producer.wire.calls import batches, reads, submissions, transitions
from pagemill.producer.wire.calls.gateway.waiters import HangUpReply, hang_up
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import (
    BatchCounts,
    Delta,
    ErrorInfo,
    JobStatus,
    Output,
    Progress,
    Result,
    Usage,
)
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.server.transport import SyncTransport

T = TypeVar("T")

PLENTY = 1_000_000


def result_json(job_id: str, text: str = "ok", **fields: Any) -> str:
    output = Output(index=0, text=text, token_ids=(1, 2, 3), finish_reason="stop")
    return Result(
        id=job_id, outputs=(output,), model="m", usage=Usage(prompt_tokens=2), **fields
    ).model_dump_json()


def error_json(code: str = "invalid_job", message: str = "no good") -> str:
    return ErrorInfo(code=code, message=message).model_dump_json()


def delta(offset: int, *token_ids: int, index: int = 0, text: str = "") -> Delta:
    return Delta(index=index, offset=offset, token_ids=token_ids, text=text or "x" * len(token_ids))


DECODE = Progress(phase="decode", prompt_tokens_done=4, prompt_tokens=4, generated_tokens=2, max_tokens=16)


@dataclass
class Queue:
    """One queue on a real server; as a context manager it is closed at the end."""

    name: str
    url: str
    transport: SyncTransport

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.transport.close()

    def run(self, call: Call[T]) -> T:
        return self.transport.run(call)

    def submit(
        self, *job_ids: str, batch_id: str | None = None, waiter: str | None = None, **fields: Any
    ) -> list[str]:
        """Submit one job per id with the same fields; returns the statuses."""
        job = Job.parse({"prompt": "hello", "model": "m"} | fields)
        items = [submissions.prepare(job, job_id, waiter=waiter) for job_id in job_ids]
        return [reply.status for reply in self.run(submissions.submit(self.name, items, batch_id=batch_id))]

    def pull(
        self,
        max_jobs: int = 10,
        *,
        worker: str = "w1",
        cost: int = PLENTY,
        lease_ms: int = 60_000,
        models: tuple[str, ...] = ("m",),
        **options: Any,
    ) -> list[PulledJob]:
        call = transitions.pull(self.name, worker, models, max_jobs, cost, lease_ms, **options)
        return self.run(call).jobs

    def pull_one(self, **options: Any) -> PulledJob:
        (job,) = self.pull(1, **options)
        return job

    def commit(self, job: PulledJob, text: str = "ok", **options: Any) -> str:
        body = result_json(job.job_id, text)
        return self.run(transitions.commit(self.name, job.job_id, job.token, "succeeded", body, **options))

    def fail(self, job: PulledJob, state: Any = "failed", code: str = "invalid_job") -> str:
        error = error_json(code)
        return self.run(transitions.commit(self.name, job.job_id, job.token, state, error_json=error))

    def checkpoint(self, job: PulledJob, *deltas: Delta, progress: Progress = DECODE, **options: Any) -> str:
        return self.run(transitions.checkpoint(self.name, job.job_id, job.token, progress, deltas, **options))

    def release(self, job: PulledJob) -> str:
        return self.run(transitions.release(self.name, job.job_id, job.token))

    def retry(self, job: PulledJob, delay_s: float = 0.0, **options: Any) -> str:
        error = ErrorInfo(code="engine_error", message="it broke", retryable=True)
        return self.run(transitions.retry(self.name, job.job_id, job.token, error, delay_s, **options))

    def cancel(self, job_id: str) -> str:
        return self.run(transitions.cancel(self.name, [job_id]))[0]

    def hang_up(self, waiter: str, *job_ids: str) -> list[HangUpReply]:
        return self.run(hang_up(self.name, waiter, job_ids))

    def status(self, job_id: str) -> JobStatus:
        found = self.run(reads.statuses(self.name, [job_id]))[0]
        assert found is not None
        return found

    def result(self, job_id: str) -> Result:
        result = self.run(reads.outcome(self.name, job_id)).result
        assert result is not None
        return result

    def error(self, job_id: str) -> ErrorInfo:
        error = self.run(reads.outcome(self.name, job_id)).error
        assert error is not None
        return error

    def counts(self, batch_id: str) -> BatchCounts:
        counts = self.run(batches.counts(self.name, batch_id))
        assert counts is not None
        return counts

    def sweep(self, times: int = 1) -> None:
        for _ in range(times):
            self.run(transitions.sweep(self.name))

    def state(self, job_id: str) -> str:
        return self.status(job_id).state

    def lapse(self, job_id: str) -> None:
        """Let the job's lease expire now, as if its worker had been silent for a long time."""
        self.client.zadd(f"{self.prefix}leases", {job_id: 1}, xx=True)

    def make_due(self, job_id: str) -> None:
        self.client.zadd(f"{self.prefix}delayed", {job_id: 1}, xx=True)

    @property
    def client(self) -> redis.Redis:
        return self.transport.client

    @property
    def prefix(self) -> str:
        return keys.prefix(self.name)

    def names(self) -> set[str]:
        """Every key of the queue, without its prefix."""
        return {
            key.decode().removeprefix(self.prefix) for key in self.client.scan_iter(f"{self.prefix}*", 1000)
        }


def open_queue(url: str, name: str) -> Queue:
    return Queue(name, url, SyncTransport(open_client(url, name)))
