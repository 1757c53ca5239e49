"""Time breakdowns of jobs that real workers ran: `pagemill why`, `handle.why()`."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagemill.cli import why as cli_why  # noqa: F401 - it registers itself
from pagemill.cli.app import app
from pagemill.producer.client.aio import AsyncProducer
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import account
from pagemill.producer.wire.calls.account import JobAccount
from pagemill.producer.wire.schema.errors import JobNotFound
from tests.chaos.fork_server import ForkServer
from tests.worker.harness import QueueClient, eventually, process_settings, running_worker, worker_config

pytestmark = pytest.mark.slow

TOKENS = 60
JOB = {"prompt": "0123456789" * 12, "max_tokens": TOKENS, "ignore_eos": True}


def read(client: QueueClient, job_id: str) -> dict[str, float]:
    """The parts of a job, which sum to its lifetime by the server's clock."""
    found: JobAccount = client.run(account.why(client.queue, job_id))
    record = client.redis.hgetall(f"pagemill:{{{client.queue}}}:job:{job_id}")
    lifetime = int(record[b"finished_at"]) - int(record[b"at"])
    assert sum(round(1000 * part.seconds) for part in found.parts) == lifetime == round(1000 * found.seconds)
    assert all(part.seconds > 0 for part in found.parts)
    return {part.cause: part.seconds for part in found.parts}


def test_a_worker_accounts_for_all_of_its_time(client: QueueClient) -> None:
    early = client.submit(JOB)[0]
    config = worker_config(client.url, client.queue, model="echo:5", max_num_seqs=2)
    with running_worker(config) as worker:
        client.wait([early])
        ids = client.submit(*(JOB for _ in range(6)))
        client.wait(ids)
        counted = worker.counters.job_seconds.read()
    assert counted["decode"] >= 7 * 0.005 * (TOKENS - 1)
    assert counted["queued"] >= read(client, early)["no_worker"]
    assert all(counted[cause] > 0 for cause in ("opening", "prompt", "commit"))
    parts = read(client, early)
    assert parts["no_worker"] > 0, "loading"
    assert parts["decode"] >= 0.005 * (TOKENS - 1)
    last = max((read(client, job_id) for job_id in ids), key=lambda found: found.get("behind", 0.0))
    assert last["behind"] >= 2 * 0.005 * TOKENS
    assert set(last) <= {"behind", "opening", "step_budget", "sequence_slot", "prompt", "decode", "commit"}
    found: JobAccount = client.run(account.why(client.queue, ids[-1]))
    assert found.decoded_beside == pytest.approx(1.0, abs=0.4)
    assert found.behind[0].jobs >= 3


def test_what_a_killed_worker_had_not_saved_is_repeated(client: QueueClient, tmp_path: Path) -> None:
    settings = process_settings(client.url, client.queue, model="echo:20", checkpoint_s=0.1)
    job_id = client.submit(JOB)[0]
    with ForkServer(tmp_path, settings) as fork_server:
        worker = fork_server.spawn()
        eventually(lambda: client.generated(job_id) >= 10, "a checkpoint")
        killed_at = time.monotonic()
        worker.signal(signal.SIGKILL)
        worker.wait()
        fork_server.spawn()
        client.wait([job_id])
        since = time.monotonic() - killed_at
    parts = read(client, job_id)
    assert settings["lease_s"] * 0.5 <= parts["repeated"] <= since
    assert parts["running"] >= 0.1, "what its checkpoint saved counts"
    assert parts["decode"] >= 0.1


async def test_a_client_asks_why(client: QueueClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_REDIS_URL", client.url)
    monkeypatch.setenv("PAGEMILL_QUEUE", client.queue)
    with (
        running_worker(worker_config(client.url, client.queue)),
        Producer(client.url, queue=client.queue) as producer,
    ):
        handle = producer.submit(prompt="hello", model="echo")
        handle.result(timeout=60)
        found = handle.why()
        with pytest.raises(JobNotFound):
            producer.job("nobody").why()
        async with AsyncProducer(client.url, queue=client.queue) as other:
            assert await other.job(handle.id).why() == found
    document = json.loads(command(handle.id, "--json"))
    assert JobAccount.model_validate(document) == found
    lines = [line.split("\t") for line in command(handle.id).splitlines()]
    assert [line[0] for line in lines] == [*(part.cause for part in found.parts), "succeeded"]
    assert lines[-1][1:3] == [f"{found.seconds:.3f} s", "100%"]
    with Producer(client.url, queue=client.queue) as producer:
        producer.submit_many([{"prompt": "x", "model": "echo"}] * 3, batch_id="some")
    of_batch = json.loads(command("--batch", "some", "--json"))
    assert (of_batch["jobs"], of_batch["sampled"]) == (3, 3)
    (waiting,) = of_batch["causes"]
    assert waiting["cause"] == "no_worker"
    assert waiting["seconds"] >= 3 * waiting["p50"] - 0.1
    assert command("--batch", "some").splitlines()[-1].startswith("no_worker\t100%")
    for arguments in ([], ["an-id", "--batch", "some"]):
        assert CliRunner().invoke(app, ["why", *arguments]).exit_code == 2
    refused = CliRunner().invoke(app, ["why", "nobody"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "no job nobody" in refused.stderr


def command(*words: str) -> str:
    result = CliRunner().invoke(app, ["why", *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout
