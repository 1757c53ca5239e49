"""A worker whose model is spread over two processes: served by a real server, and one of the two killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.worker.harness import (
    QueueClient,
    WorkerProcess,
    eventually,
    process_settings,
    running_worker,
    worker_config,
)

pytestmark = pytest.mark.slow

PATIENCE_S = 280.0
"""Two processes load torch, and kernels may have to be compiled first."""
PROMPT = [5, 17, 42, 99, 3, 64]
TOKENS = 400
JOBS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 7, "temperature": 0.9, "top_p": 0.95},
    {"seed": 8, "temperature": 0.9, "n": 2},
]


def settings(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model), "num_kv_blocks": 512, "max_num_seqs": 16, "num_threads": 1, "device": "cpu",
        "checkpoint_s": 0.05, "checkpoint_tokens": 8, "skip_tokenizer_init": True, **more,
    }  # fmt: skip


def submit(client: QueueClient) -> list[str]:
    common = {"model": "tiny", "prompt_token_ids": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
    return client.submit(*(common | options for options in JOBS))


def parallel_worker(client: QueueClient, model: Path, tmp_path: Path, **options: Any) -> WorkerProcess:
    given = process_settings(client.url, client.queue, **settings(model, tensor_parallel_size=2, **options))
    return WorkerProcess(given, tmp_path / "worker.log")


def rank_processes(worker: WorkerProcess) -> list[psutil.Process]:
    children = psutil.Process(worker.process.pid).children(recursive=True)
    return [
        child for child in children if "pagemill.engine.execution.parallel.rank_process" in child.cmdline()
    ]


def test_a_killed_rank_ends_its_worker_and_another_finishes_the_jobs(
    model: Path, tmp_path: Path, client: QueueClient
) -> None:
    with parallel_worker(client, model, tmp_path) as first:
        ids = submit(client)
        eventually(
            lambda: first.process.poll() is not None or all(client.generated(job_id) >= 16 for job_id in ids),
            "checkpoints",
            PATIENCE_S,
        )
        assert first.process.poll() is None, first.log()
        (rank,) = rank_processes(first)
        os.kill(rank.pid, signal.SIGKILL)
        assert first.wait() == 1
        log = first.log()
    assert "the process of rank 1 was ended by SIGKILL" in log
    assert not psutil.pid_exists(rank.pid)
    interrupted = [job_id for job_id in ids if not client.status(job_id).done]
    assert interrupted, "the jobs were too short for this machine"

    # Any worker is suitable: one process computes the same function.
    with running_worker(worker_config(client.url, client.queue, **settings(model)), PATIENCE_S):
        finished = client.results(ids, PATIENCE_S)
        alone = client.results(submit(client), PATIENCE_S)
    assert [[o.token_ids for o in result.outputs] for result in finished] == [
        [o.token_ids for o in result.outputs] for result in alone
    ]
    assert sum(result.resumed_tokens for result in finished) >= 16 * len(interrupted)
    assert {result.tier for result in finished} == {"token"}


def test_a_rank_that_dies_while_there_is_nothing_to_do_is_noticed(
    model: Path, tmp_path: Path, client: QueueClient
) -> None:
    with parallel_worker(client, model, tmp_path) as worker:
        eventually(
            lambda: (
                worker.process.poll() is not None or any(info.state == "ready" for info in client.workers())
            ),
            "the worker to be ready",
            PATIENCE_S,
        )
        (rank,) = rank_processes(worker)
        os.kill(rank.pid, signal.SIGKILL)
        assert worker.wait() == 1
    assert "the process of rank 1 was ended by SIGKILL" in worker.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["drained", "killed"])
def test_ranks_end_with_their_worker(number: int, model: Path, tmp_path: Path, client: QueueClient) -> None:
    """Also in the middle of steps; a drain lets them run on for the last ones."""
    with parallel_worker(client, model, tmp_path, drain_grace_s=0.0) as worker:
        ids = submit(client)
        eventually(lambda: all(client.generated(job_id) >= 16 for job_id in ids), "checkpoints", PATIENCE_S)
        (rank,) = rank_processes(worker)
        worker.signal(number)
        assert worker.wait() == (0 if number == signal.SIGTERM else -number)
        eventually(lambda: not psutil.pid_exists(rank.pid), "the rank to end")
