"""Adapters by name through a real queue: batches, commands, takeovers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pagemill import Producer
from pagemill.__main__ import app
from pagemill.producer.wire.calls import account
from pagemill.producer.wire.schema.errors import JobFailed
from tests.engine.adapters.trained import Trained, merged_tokens, save_adapter
from tests.worker.harness import (
    QueueClient,
    WorkerProcess,
    eventually,
    get,
    process_settings,
    running_worker,
    worker_config,
)

pytestmark = pytest.mark.slow

PROMPT = [5, 17, 42, 99, 3, 64]
JOB: dict[str, Any] = {"prompt_token_ids": PROMPT, "model": "tiny", "temperature": 0.0, "max_tokens": 24}
COMPILING_S = 400


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(model, root / name, Trained(rank=8, seed=seed, std=3.0))
        for seed, name in enumerate(("red", "blue"))
    }


def settings(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model), "num_kv_blocks": 512, "max_num_seqs": 16, "num_threads": 1, "skip_tokenizer_init": True,
        "checkpoint_s": 0.05, "checkpoint_tokens": 8,
    } | more  # fmt: skip


def command(url: str, queue: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Run `pagemill adapter ...`; returns the exit code and each worker's reply."""
    run = CliRunner().invoke(app, ["adapter", *words, "--redis-url", url, "--queue", queue, "--json"])
    return run.exit_code, json.loads(run.stdout)["workers"]


@pytest.mark.usefixtures("engine_host")
def test_jobs_name_adapters_that_come_and_go(
    client: QueueClient, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    wanted = {
        name: merged_tokens(model, None if name is None else adapters[name], [PROMPT], 24)[0]
        for name in (None, "red", "blue")
    }
    config = worker_config(client.url, client.queue, **settings(model, adapters=(f"red={adapters['red']}",)))
    with (
        Producer(client.url, queue=client.queue) as producer,
        running_worker(config, load_patience_s=COMPILING_S) as worker,
    ):
        eventually(lambda: client.workers()[0].state == "ready", "the registry knows")
        code, answers = command(client.url, client.queue, "add", f"blue={adapters['blue']}")
        assert code == 0, answers
        (answer,) = answers.values()
        assert [one["name"] for one in answer["adapters"]] == ["blue", "red"]
        jobs = {name: producer.submit(**JOB, adapter=name) for name in wanted}
        results = {name: job.result(timeout=120) for name, job in jobs.items()}
        assert {name: list(result.outputs[0].token_ids) for name, result in results.items()} == wanted
        assert len({result.fingerprint for result in results.values()}) == 3
        _, exposition = get(f"{worker.http_url}/metrics")
        (line,) = [
            line for line in exposition.decode().splitlines()
            if line.startswith("pagemill_adapter_requests_total{") and 'adapter="blue"' in line
        ]  # fmt: skip
        assert line.endswith(" 1.0")

        shutil.copytree(adapters["red"], tmp_path / "bad")
        (tmp_path / "bad" / "adapter_model.safetensors").write_bytes(b"nothing")
        code, answers = command(client.url, client.queue, "add", f"bad={tmp_path / 'bad'}")
        assert code == 1
        assert "can't load the weights" in next(iter(answers.values()))["error"]

        code, _ = command(client.url, client.queue, "remove", "red")
        assert code == 0
        code, answers = command(client.url, client.queue, "remove", "red")
        assert code == 1
        assert "unknown adapter 'red'; known: blue" in next(iter(answers.values()))["error"]
        eventually(lambda: client.workers()[0].adapters == ("blue",), "the registry knows")
        assert producer.submit(**JOB, adapter="blue").result(timeout=120).outputs[0].text == ""


def test_jobs_that_wait_for_a_slot_keep_no_rows_from_others(
    client: QueueClient, model: Path, adapters: dict[str, Path]
) -> None:
    named = tuple(f"{name}={path}" for name, path in adapters.items())
    few = settings(model, adapters=named, adapter_slots=1, max_num_seqs=4)
    with running_worker(
        worker_config(client.url, client.queue, **few), load_patience_s=COMPILING_S
    ) as worker:
        (long,) = client.submit(JOB | {"adapter": "red", "max_tokens": 1000})
        eventually(lambda: client.generated(long) > 0, "the slot to be taken")
        waiting = client.submit(*(JOB | {"adapter": "blue"} for _ in range(6)))
        eventually(
            lambda: worker.engine.stats and worker.engine.stats.adapters.waiting, "jobs to wait for it"
        )
        client.wait(client.submit(*(JOB for _ in range(3)), JOB | {"priority": "high"}))
        assert not client.status(long).done
        for outcome in client.wait([long, *waiting]):
            assert outcome.value() is not None
        accounts = [client.run(account.why(client.queue, job_id)) for job_id in waiting]
        named = {part.cause: part.seconds for found in accounts for part in found.parts if part.seconds > 0.1}
        assert "adapter" in named


def test_a_job_whose_adapter_has_just_gone_fails_alone(
    client: QueueClient, model: Path, adapters: dict[str, Path]
) -> None:
    config = worker_config(client.url, client.queue, **settings(model, adapters=(f"red={adapters['red']}",)))
    with Producer(client.url, queue=client.queue) as producer, running_worker(config, COMPILING_S) as worker:
        # It still pulls for the name: the registry's entry is slightly out of date.
        lanes = worker.admission._lanes()
        worker.admission._lanes = lambda: lanes
        worker.engine.engine.adapters.remove("red")
        with pytest.raises(JobFailed, match="unknown adapter 'red'; known: none") as failed:
            producer.submit(**JOB, adapter="red").result(timeout=120)
        assert failed.value.code == "unknown_adapter"
        assert len(producer.submit(**JOB).result(timeout=120).outputs[0].token_ids) == 24


def test_workers_are_given_only_what_they_can_serve(
    client: QueueClient, model: Path, adapters: dict[str, Path]
) -> None:
    with Producer(client.url, queue=client.queue) as producer:
        job = producer.submit(**JOB, adapter="blue")
        plain = worker_config(client.url, client.queue, **settings(model))
        with running_worker(plain, COMPILING_S):
            producer.submit(**JOB).result(timeout=120)
            assert job.status().state == "queued"
            both = tuple(f"{name}={path}" for name, path in adapters.items())
            other = worker_config(client.url, client.queue, **settings(model, adapters=both, adapter_slots=1))
            with running_worker(other, COMPILING_S) as serving:
                jobs = [job, *(producer.submit(**JOB, adapter=name) for name in ("red", "blue", "red"))]
                found = [list(one.result(timeout=120).outputs[0].token_ids) for one in jobs]
                eventually(lambda: serving.counters.commits.read()["committed"] == 4, "all to be counted")
                stats = serving.engine.stats
                assert stats is not None
                assert stats.adapters.evictions >= 1
    wanted = {name: merged_tokens(model, path, [PROMPT], 24)[0] for name, path in adapters.items()}
    assert found == [wanted[name] for name in ("blue", "red", "blue", "red")]


@pytest.mark.parametrize("same", [True, False], ids=["same weights", "other weights"])
def test_a_killed_workers_job_goes_on_with_the_same_adapter_only(
    client: QueueClient, model: Path, adapters: dict[str, Path], tmp_path: Path, same: bool
) -> None:
    weights = tmp_path / "red"
    shutil.copytree(adapters["red"], weights)
    job = JOB | {"max_tokens": 400, "adapter": "red", "ignore_eos": True}
    expected = merged_tokens(model, adapters["red" if same else "blue"], [PROMPT], 400)[0]
    given = process_settings(client.url, client.queue, **settings(model, adapters=[f"red={weights}"]))
    with Producer(client.url, queue=client.queue) as producer:
        first = WorkerProcess(given, tmp_path / "first.log")
        handle = producer.submit(**job)
        eventually(lambda: client.generated(handle.id) >= 40, "a checkpoint", COMPILING_S)
        first.kill()
        if not same:
            shutil.rmtree(weights)
            shutil.copytree(adapters["blue"], weights)
        with WorkerProcess(given, tmp_path / "second.log"):
            result = handle.result(timeout=COMPILING_S)
    assert list(result.outputs[0].token_ids) == expected
    assert (result.resumed_tokens >= 40) is same
