"""Workers that audit each other: canaries on real workers, and the quarantine of a worker with wrong results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.models.echo import EchoRunner
from pagemill.producer.wire.calls import audit
from pagemill.worker.worker import Worker
from tests.engine.tiny_model import save_tiny_llama
from tests.worker.harness import QueueClient, eventually, get, get_json, running_worker, worker_config

OFTEN = {"audit_interval_s": 0.1}


@contextmanager
def workers(client: QueueClient, count: int, **settings: Any) -> Iterator[list[Worker]]:
    config = worker_config(client.url, client.queue, **(OFTEN | settings))
    with ExitStack() as stack:
        yield [stack.enter_context(running_worker(config)) for _ in range(count)]


def flip_bits(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the worker's echo model return a different result from now on: each token is the next one."""
    runner = worker.engine.engine._parts.executor  # type: ignore[attr-defined]
    assert isinstance(runner, EchoRunner)
    right = runner._next
    monkeypatch.setattr(runner, "_next", lambda sample: (right(sample) + 1) % 200)


def verdicts(worker: Worker) -> dict[str, float]:
    return worker.counters.canaries.read()


@pytest.mark.slow
def test_a_deviating_worker_is_quarantined(client: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(client, 3, model="echo:20") as fleet:
        eventually(lambda: all(verdicts(one)["clean"] for one in fleet), "each worker to be clean")
        for other in fleet[1:]:
            other._pulling.decide("pause")
        eventually(lambda: [one.state for one in client.workers()].count("paused") == 2, "two to pause")
        (job_id,) = client.submit({"prompt": "hello", "max_tokens": 150, "ignore_eos": True, "stream": True})
        eventually(lambda: client.generated(job_id), "the job to have a checkpoint")
        bad = fleet[0]
        flip_bits(bad, monkeypatch)
        eventually(lambda: bad.audit.reason, "the worker to be quarantined")
        eventually(lambda: client.status(job_id).state == "queued", "its job to be requeued")
        assert not client.redis.exists(f"pagemill:{{{client.queue}}}:ckpt:{job_id}"), (
            "its output may be wrong"
        )
        status, ready = get_json(f"{bad.http_url}/readyz")
        assert (status, ready["state"], ready["reason"]) == (503, "quarantined", bad.audit.reason)
        eventually(
            lambda: {one.id: one.state for one in client.workers()}[bad.worker_id] == "quarantined",
            "the registry to say so",
        )
        assert 'pagemill_worker_state{state="quarantined"} 1' in _metrics(bad)
        assert bad.failure() is None, "the process stays, for an operator to look at"
        for other in fleet[1:]:
            other._pulling.decide("resume")
        (outcome,) = client.wait([job_id])
        assert outcome.result is not None
        assert outcome.result.outputs[0].text == "hello" * 30
        assert not any(verdicts(one)["deviates"] for one in fleet[1:])


@pytest.mark.slow
def test_a_dispute_of_two_is_decided_by_a_third(client: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EchoRunner, "_scores", _shifted(EchoRunner._scores))
    with workers(client, 1) as (bad,):
        eventually(lambda: verdicts(bad)["alone"], "the worker to propose")
    monkeypatch.undo()
    with workers(client, 1) as (second,):
        eventually(lambda: verdicts(second)["disputed"], "two answers")
        assert second.audit.reason is None, "no one knows yet who is wrong"
        with workers(client, 1, audit_interval_s=60.0) as (third,):
            eventually(lambda: verdicts(third)["clean"], "the third, who is asked at once, to decide")
            eventually(lambda: verdicts(second)["clean"], "the second to be right")
            (accused,) = client.run(audit.accused(client.queue))
            assert (accused.worker, accused.state) == (bad.worker_id, "quarantined")
            assert second.audit.reason is None


@pytest.mark.slow
def test_a_canary_that_fails_is_no_deviation(client: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with workers(client, 1) as (worker,):
        eventually(lambda: verdicts(worker)["alone"], "a canary")
        monkeypatch.setattr("pagemill.worker.audit.auditor.PATIENCE_S", 0.0)
        eventually(lambda: verdicts(worker)["failed"], "a canary that takes too long")
        assert worker.audit.reason is None


@pytest.mark.slow
def test_a_canary_runs_though_jobs_wait_all_the_time(client: QueueClient) -> None:
    with workers(client, 1, model="echo:5", max_num_seqs=1) as (worker,):
        job_ids = client.submit(*({"prompt": "text", "max_tokens": 20} for _ in range(200)))
        eventually(lambda: verdicts(worker)["alone"] >= 2, "two canaries")
        assert client.status(job_ids[-1]).state == "queued"


@pytest.mark.slow
def test_one_flipped_bit_of_a_weight_is_found(client: QueueClient, tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, vocab_size=512, hidden_size=64, intermediate_size=128)
    model: dict[str, Any] = {
        "model": str(tmp_path), "served_model_name": ("echo",), "device": "cpu", "num_threads": 1,
        "batch_invariant": True, "skip_tokenizer_init": True,
    }  # fmt: skip
    with workers(client, 5, audit_interval_s=0.3, **model) as fleet:
        eventually(lambda: all(verdicts(one)["clean"] for one in fleet), "each worker to be clean")
        bad = fleet[2]
        assert bad.engine.engine.tier == "bitwise"
        module = bad.engine.engine._parts.executor._model.loaded.module  # type: ignore[attr-defined]
        bits = module.model.norm.weight.data.view(torch.int32)
        bits[7] ^= 1 << 10  # of the mantissa: about one part in 8,000
        eventually(lambda: bad.audit.reason, "the worker to be quarantined")
        others = [one for one in fleet if one is not bad]
        past = [verdicts(one)["clean"] for one in others]
        eventually(
            lambda: all(verdicts(one)["clean"] > count for one, count in zip(others, past, strict=True)),
            "the others to be clean still",
        )
        assert not any(one.audit.reason for one in others)


@pytest.mark.slow
def test_hundreds_of_canaries_beside_jobs_raise_no_alarm(client: QueueClient) -> None:
    with workers(client, 4, audit_interval_s=0.01, model="echo:1") as fleet:
        while sum(sum(verdicts(one).values()) for one in fleet) < 400:
            client.wait(
                client.submit(*({"prompt": f"text {number}", "max_tokens": 20} for number in range(30)))
            )
        assert not any(verdicts(one)[word] for one in fleet for word in ("disputed", "deviates", "failed"))


def _shifted(right: Any) -> Any:
    def scores(runner: EchoRunner, *args: Any) -> Any:
        found = right(runner, *args)
        for one in found:
            one.logprob -= 1.0
        return found

    return scores


def _metrics(worker: Worker) -> str:
    return get(f"{worker.http_url}/metrics")[1].decode()
