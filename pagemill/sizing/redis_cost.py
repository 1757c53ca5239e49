"""Cost of a job in Redis: bytes while it waits and after it has ended, scripts while it runs.

Payload and result are created like in producers and workers, so a change of either changes the results; the overhead
was measured (tests/sizing/test_redis_cost.py and test_plan.py verify it).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.producer.wire.calls import submissions
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result, Usage

RECORD_BYTES = 510
"""Record, places in lane and batch, names of keys, and what the allocator rounds up, of a waiting job (Valkey 9)."""
ENDED_BYTES = 470
SERVER_BYTES = 4 << 20
"""Bytes of an empty server with Pagemill's scripts and the tables of a queue."""
SCRIPT_S = 200e-6
"""A core's time per script, including the network, on a virtual core of 2.5 GHz (simulation of 2026-11-21)."""
_ID = "0" * 32
_TOKEN = 12_345
CHECKPOINT_S = 1.0
CHECKPOINT_TOKENS = 32
_BYTES_PER_TOKEN_ID = 7.0
"""In a checkpoint."""


@dataclass(frozen=True, slots=True)
class JobBytes:
    waiting: int
    running: int
    """Bytes with its payload and, on average, half of its tokens in the checkpoint."""
    ended: int


def job_bytes(prompt_tokens: int, output_tokens: int, bytes_per_token: float) -> JobBytes:
    """Measure a text job of a batch. `bytes_per_token`: of text, prompt and output."""
    prompt = "x" * max(1, round(prompt_tokens * bytes_per_token))
    job = Job.parse({"model": "model", "prompt": prompt, "max_tokens": output_tokens, "temperature": 0.0})
    payload = len(submissions.prepare(job, _ID, seed=1).payload)
    output = Output(
        index=0,
        text="x" * round(output_tokens * bytes_per_token),
        token_ids=(_TOKEN,) * output_tokens,
        finish_reason="length",
    )
    usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=output_tokens)
    result = len(Result(id=_ID, outputs=(output,), usage=usage, model="model", seed=1).model_dump_json())
    waiting = payload + RECORD_BYTES
    return JobBytes(
        waiting, waiting + round(output_tokens / 2 * _BYTES_PER_TOKEN_ID) + 200, result + ENDED_BYTES
    )


def scripts_per_job(
    service_s: float, output_tokens: int, rows: float, *, checkpoint_tokens: int | None = CHECKPOINT_TOKENS
) -> float:
    """Count a job's scripts: pull, announcement, commit, checkpoints, its share of renewals and heartbeats.

    Args:
        service_s: the job's time in the engine.
        rows: jobs that its worker runs concurrently.
        checkpoint_tokens: a checkpoint is written after these or after a second; None: after a second.
    """
    by_time = max(0.0, service_s / CHECKPOINT_S - 0.5)
    by_tokens = 0.0 if checkpoint_tokens is None else output_tokens // checkpoint_tokens
    jobs_per_s = max(rows, 1.0) / max(service_s, 1e-3)
    # A checkpoint contains at least one token.
    return 3.0 + min(output_tokens, max(by_time, by_tokens)) + 1.0 / jobs_per_s
