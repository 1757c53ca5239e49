"""Workers without engines that pull and commit a queue's jobs, each in a process with a separate connection."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from typing import Any

import redis

from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.metering.usage import JobUsage
from pagemill.producer.wire.schema.outputs import Output, Progress, Result, Usage
from pagemill.producer.wire.server.transport import SyncTransport

PLENTY = 1 << 40
PATIENCE_S = 120.0
_ID = "0" * 24
_PROGRESS = Progress(
    phase="decode", prompt_tokens_done=170, prompt_tokens=170, generated_tokens=16, max_tokens=16
)
_USED = JobUsage(170, 128, 16, 0.05)


@dataclass(frozen=True, slots=True)
class Drained:
    """The cost to pull and commit every job; microseconds are CPU time per job."""

    jobs: int
    seconds: float
    server_us: float
    workers_us: float

    @property
    def rate(self) -> float:
        """Jobs per second by the clock."""
        return self.jobs / self.seconds

    @property
    def server_rate(self) -> float:
        """Jobs per second that the server's CPU time allows."""
        return 1e6 / self.server_us


def processor_seconds(client: redis.Redis) -> float:
    """Return the server's CPU time so far, of its main thread if the server reports that."""
    found = client.info("cpu")
    if "used_cpu_user_main_thread" in found:
        return float(found["used_cpu_user_main_thread"] + found["used_cpu_sys_main_thread"])
    return float(found["used_cpu_user"] + found["used_cpu_sys"])


def drain(url: str, queue: str, model: str, workers: int, at_once: int) -> Drained:
    """Pull and commit all waiting jobs. Each worker pulls `at_once` jobs, and commits them in one round trip."""
    context = multiprocessing.get_context("spawn")
    start, done = context.Barrier(workers + 1), context.Queue()
    processes = [
        context.Process(
            target=_work, args=(url, queue, model, f"w{number}", at_once, start, done), daemon=True
        )
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        with redis.Redis.from_url(url) as client:
            start.wait(PATIENCE_S)
            before = processor_seconds(client)
            ends = [done.get(timeout=PATIENCE_S) for _ in processes]
            spent = processor_seconds(client) - before
    finally:
        for process in processes:
            process.join(PATIENCE_S)
    jobs = sum(count for count, _, _, _ in ends)
    seconds = max(end for *_, end in ends) - min(begin for _, _, begin, _ in ends)
    return Drained(jobs, seconds, spent / jobs * 1e6, sum(cpu for _, cpu, _, _ in ends) / jobs * 1e6)


def _work(url: str, queue: str, model: str, name: str, at_once: int, start: Any, done: Any) -> None:
    body = Result(
        id=_ID,
        outputs=(Output(index=0, text="positive " * 8, token_ids=tuple(range(16)), finish_reason="stop"),),
        model=model,
        usage=Usage(prompt_tokens=170),
    ).model_dump_json()
    head, tail = (part.encode() for part in body.split(_ID))
    with redis.Redis.from_url(url) as client:
        transport = SyncTransport(client)
        transport.run(transitions.pull(queue, name, [model], 0, PLENTY))  # connect, and load the scripts
        pull = transitions.pull(queue, name, [model], at_once, PLENTY, 60_000)
        start.wait(PATIENCE_S)
        began, cpu, count = time.perf_counter(), time.process_time(), 0
        while jobs := transport.run(pull).jobs:
            outcome: Any = {"progress": _PROGRESS, "used": _USED}
            commits = [
                transitions.commit(queue, id_, token, "succeeded", head + id_.encode() + tail, **outcome)
                for id_, token in ((job.job_id, job.token) for job in jobs)
            ]
            words = set(transport.run_many(commits))
            assert words == {"committed"}, words
            count += len(jobs)
        done.put((count, time.process_time() - cpu, began, time.perf_counter()))
