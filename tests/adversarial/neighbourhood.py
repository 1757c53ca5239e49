"""A worker process with two tenants: one is well-behaved, and its results when alone are known."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pagemill.common.error_codes import FINAL_CODES
from pagemill.producer.wire.calls import submissions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output
from pagemill.producer.wire.schema.signing import Keys
from tests.adversarial.hostile_jobs import HostileJob
from tests.worker.harness import QueueClient, WorkerProcess, process_settings

KEY = "k" * 32
SIGNER = Keys([KEY])
PATIENCE_S = 60.0
"""The time limit for hostile jobs of one kind, on a model without compute costs; a real one has ten times as long."""
SLOWER = 20
"""Until the good tenant's jobs have finished, the worker may compute for this many times their time alone,
plus `GRACE_S`."""
GRACE_S = 5.0
LONGEST = {"echo": 4000, "smollm2": 8000}
"""Tokens of a prompt just below the model's limit. Its client has a right to its turns, and it makes all
concurrent steps long."""
MAX_GROWTH_MB = 700
"""The worker's memory compared with good jobs alone."""
TYPED = FINAL_CODES | {"deadline_exceeded", "attempts_exhausted"}
UNTYPED_CAUSES = {"engine_error", "worker_lost", "out_of_memory"}
"""Codes of internal errors, which no job may cause."""


@dataclass
class Neighbourhood:
    """A worker process, its queue, and the good tenant's results when it is alone."""

    client: QueueClient
    model: str
    process: WorkerProcess
    texts: list[list[Output]]
    alone_s: float
    """CPU time for the good jobs."""
    memory_mb: float

    def limit_s(self, kind: str) -> float:
        """CPU time until the good jobs have finished next to hostile ones of this kind."""
        return SLOWER * self.alone_s + GRACE_S + (self.run_longest() if kind == "large inputs" else 0.0)

    def good_jobs(self) -> list[str]:
        ids = []
        for i in range(12):
            fields = {
                "prompt": f"The capital of country {i} is", "max_tokens": 24, "seed": i, "tenant": "good",
            }  # fmt: skip
            fields |= {"temperature": 0.0} if i % 3 == 0 else {"top_p": 0.9, "logprobs": 3 if i % 2 else None}
            item = self._item(json.loads(Job.parse(fields | {"model": self.model}).to_payload()), {}, "good")
            ids += self._submit([item])
        return ids

    def hostile_jobs(self, jobs: list[HostileJob]) -> list[str]:
        return self._submit([self._hostile(job) for job in jobs])

    def _submit(self, items: list[Submission]) -> list[str]:
        for item in items:
            (reply,) = self.client.run(submissions.submit(self.client.queue, [item]))
            assert reply.status in ("created", "too_large")
        return [item.job_id for item in items]

    def _hostile(self, job: HostileJob) -> Submission:
        if job.raw is None:
            fields = {name: value for name, value in job.fields.items() if value is not None}
            return self._item(
                {"v": 1, "model": self.model, "tenant": "evil"} | fields, job.header, "evil", job
            )
        return self._item(job.raw.replace(b"MODEL", self.model.encode()), job.header, "evil", job)

    def _item(
        self, envelope: object, header: dict[str, object], tenant: str, job: HostileJob | None = None
    ) -> Submission:
        payload = envelope if isinstance(envelope, bytes) else json.dumps(envelope).encode()
        job_id = uuid.uuid4().hex
        if (job is None or job.is_signed) and payload:
            payload = SIGNER.sign_payload(payload, queue=self.client.queue, job_id=job_id, tenant=tenant)
        lane = keys.lane("1", "normal", tenant, self.model)
        return Submission(
            job_id, json.dumps({"id": job_id, "lane": lane, "cost": 40} | header).encode(), payload
        )

    def what_is_wrong(self, job: HostileJob, job_id: str) -> str:
        """With its outcome; empty: none. Results without a check are not read: they may be large."""
        found = self.client.redis.hget(f"{keys.prefix(self.client.queue)}job:{job_id}", "state")
        state = (found or b"never stored").decode()
        if state == "never stored":
            return ""
        if state == "succeeded":
            return "" if job.is_right is None or job.is_right(self.client.outcome(job_id).result) else "wrong"
        if state not in ("failed", "expired", "dead"):
            return state
        error = self.client.outcome(job_id).error
        if error is None:
            return f"{state} without a reason"
        is_typed = error.code in TYPED and error.cause not in UNTYPED_CAUSES
        return "" if is_typed else f"{error.code} {error.cause}: {error.message[:200]}"

    def run_good_jobs(self) -> tuple[list[list[Output]], float]:
        """Return the outcomes, and the worker's CPU time until the last job had finished."""
        return self._run(self.good_jobs)

    def run_longest(self) -> float:
        """Return the worker's CPU time for a prompt of `LONGEST` tokens alone."""
        fields = {"prompt_token_ids": [65] * LONGEST[self.model], "max_tokens": 8, "tenant": "good"}
        item = self._item(json.loads(Job.parse(fields | {"model": self.model}).to_payload()), {}, "good")
        return self._run(lambda: self._submit([item]))[1]

    def _run(self, submit: Callable[[], list[str]]) -> tuple[list[list[Output]], float]:
        before_s = processor_s(self.process)
        outcomes = self.client.wait(submit(), 10 * PATIENCE_S)
        spent_s = processor_s(self.process) - before_s
        for outcome in outcomes:
            assert outcome.state == "succeeded", outcome.error
            assert outcome.result is not None
        return [list(outcome.result.outputs) for outcome in outcomes if outcome.result], spent_s


@contextmanager
def neighbourhood(url: str, model: str, directory: Path, **settings: object) -> Iterator[Neighbourhood]:
    queue = f"q-{uuid.uuid4().hex[:12]}"
    config = process_settings(url, queue, model=model, lease_s=6.0, max_num_seqs=64, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEMILL_HMAC_KEYS", KEY)
        process = WorkerProcess(config, directory / f"{queue}.log")
    client = QueueClient(url, queue)
    try:
        served = model.partition(":")[0]
        one = Neighbourhood(client, served, process, [], 0.0, 0.0)
        one.texts, _ = one.run_good_jobs()
        again, one.alone_s = one.run_good_jobs()
        assert again == one.texts
        one.memory_mb = memory_mb(process)
        yield one
    finally:
        process.kill()
        client.redis.close()


def memory_mb(process: WorkerProcess) -> float:
    return float(psutil.Process(process.process.pid).memory_info().rss >> 20)


def processor_s(process: WorkerProcess) -> float:
    """The CPU time of the worker and its children: other load on the machine does not count."""
    worker = psutil.Process(process.process.pid)
    spent_s = 0.0
    for one in (worker, *worker.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # a process that has just exited is in its parent's times
            spent_s += sum(one.cpu_times()[:4])
    return spent_s


@contextmanager
def watched(process: WorkerProcess) -> Iterator[list[float]]:
    """The worker's memory, sampled twenty times per second."""
    found = [memory_mb(process)]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.05) and process.process.poll() is None:
            found.append(memory_mb(process))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
