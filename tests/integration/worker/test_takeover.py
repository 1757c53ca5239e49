"""A job whose worker was killed or drained continues in another worker with an unchanged result, in fp32."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from pagemill.producer.wire.schema.outputs import Result
from tests.chaos.fork_server import ForkServer
from tests.worker.harness import QueueClient, eventually, process_settings, running_worker, worker_config

TOKENS = 400
PROMPT = [5, 17, 42, 99, 3, 64]
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.2}
JOBS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"seed": 7, **SAMPLED},
    "three samples": {"seed": 8, "n": 3, **SAMPLED},
    "with logprobs": {"seed": 9, "logprobs": 2, "repetition_penalty": 1.1},
    "streamed": {"seed": 10, "stream": True, "top_k": 20},
}

COMPILING_S = 400
"""Kernels may have to be compiled first."""


def settings(model: Path) -> dict[str, Any]:
    return {
        "model": str(model), "num_kv_blocks": 512, "max_num_seqs": 16, "num_threads": 1,
        "skip_tokenizer_init": True,
        "checkpoint_s": 0.05, "checkpoint_tokens": 8,
    }  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(valkey_url: str, model: Path) -> dict[str, Result]:
    client = QueueClient(valkey_url, "uninterrupted")
    config = worker_config(valkey_url, client.queue, **settings(model))
    with running_worker(config, load_patience_s=COMPILING_S):
        outcomes = client.wait(submit(client))
    client.redis.close()
    return {name: outcome.value() for name, outcome in zip(JOBS, outcomes, strict=True)}


def submit(client: QueueClient) -> list[str]:
    common = {"model": "tiny", "prompt_token_ids": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
    return client.submit(*(common | options for options in JOBS.values()))


def interrupt(
    client: QueueClient, fork_server: ForkServer, number: int
) -> tuple[list[str], list[str]] | None:
    """Submit the jobs, and stop a worker in between: (all jobs, the unfinished ones). None: it was faster."""
    ids = submit(client)
    worker = fork_server.spawn()
    eventually(lambda: all(client.generated(job_id) >= 16 for job_id in ids), "checkpoints", COMPILING_S)
    worker.signal(number)
    worker.wait()
    interrupted = [job_id for job_id in ids if not client.status(job_id).done]
    return (ids, interrupted) if interrupted else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGTERM, id="drained"),
    ],
)
def test_takeover(
    number: int, client: QueueClient, model: Path, uninterrupted: dict[str, Result], tmp_path: Path
) -> None:
    with ForkServer(
        tmp_path, process_settings(client.url, client.queue, drain_grace_s=0.0, **settings(model))
    ) as fork_server:
        ids, interrupted = eventually(
            lambda: interrupt(client, fork_server, number), "a worker ended amid its jobs"
        )
        with running_worker(worker_config(client.url, client.queue, **settings(model))) as second:
            outcomes = client.wait(ids)
            saved = second.counters.resumed_tokens.read()
    results = {name: outcome.value() for name, outcome in zip(JOBS, outcomes, strict=True)}
    resumed = 0
    for name, result in results.items():
        assert result is not None
        expected = uninterrupted[name]
        assert [o.token_ids for o in result.outputs] == [o.token_ids for o in expected.outputs], name
        assert result.usage.completion_tokens == expected.usage.completion_tokens
        assert result.tier == "token"
        for output in result.outputs:
            if name == "with logprobs":
                assert output.logprobs is not None
                assert [entry.chosen.token_id for entry in output.logprobs] == list(output.token_ids)
        resumed += result.resumed_tokens
    assert resumed >= 8 * len(interrupted)
    assert saved >= resumed
