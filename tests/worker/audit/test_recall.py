"""One of five workers computes wrong results; its jobs since its last clean canary are recalled, once each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from pagemill.producer.wire.calls import audit, batches
from pagemill.producer.wire.schema.outputs import BatchItem
from tests.worker.audit.test_auditor import flip_bits, verdicts, workers
from tests.worker.harness import QueueClient, eventually

NUM_JOBS = 60


def recall(client: QueueClient, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pagemill", "recall", *words, "--queue", client.queue, "--json"]
    env = os.environ | {"PAGEMILL_REDIS_URL": client.url}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)


def wrong_ids(client: QueueClient, job_ids: list[str]) -> set[str]:
    outcomes = [client.outcome(job_id) for job_id in job_ids]
    return {
        one.job_id
        for one in outcomes
        if one.result is None or not one.result.outputs[0].text.startswith("text ")
    }


def feed(client: QueueClient, batch_id: str) -> list[BatchItem]:
    page: batches.Page = client.run(batches.page(client.queue, batch_id, 0, ordered=False))
    return page.items


def jobs() -> list[dict[str, object]]:
    return [{"prompt": f"text {number:04}", "max_tokens": 9} for number in range(NUM_JOBS)]


@pytest.mark.slow
def test_exactly_what_it_committed_is_recalled_once_though_the_recall_is_killed(
    client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with workers(
        client, 5, model="echo:20", max_num_seqs=1, audit_interval_s=1.0, audit_input_mib=16
    ) as fleet:
        early = client.submit(*jobs())
        client.wait(early)
        before = [verdicts(one)["clean"] for one in fleet]
        eventually(
            lambda: all(verdicts(one)["clean"] >= past + 2 for one, past in zip(fleet, before, strict=True)),
            "canaries after these jobs",
        )
        bad = fleet[0]
        flip_bits(bad, monkeypatch)
        late = client.submit(*jobs(), batch_id="late")
        eventually(lambda: bad.audit.reason, "the worker to be quarantined")
        client.wait(late)
        wrong = wrong_ids(client, late)
        assert wrong, "it was found before it committed anything"
        assert wrong_ids(client, early) == set()
        listed: list[str] = client.run(audit.listed_jobs(client.queue, bad.worker_id, 1000))
        assert set(listed) == wrong
        assert len(listed) == len(wrong)

        first = recall(client, "run", bad.worker_id)
        assert first.stdout is not None
        assert json.loads(first.stdout.readline())["outcome"] == "superseded"
        first.send_signal(signal.SIGKILL)
        first.communicate()
        assert client.run(audit.accused(client.queue)), "it was killed on its way"
        second = recall(client, "auto", "--every", "0.5")
        eventually(lambda: client.run(audit.accused(client.queue)) == [], "the recall to be over")
        second.send_signal(signal.SIGKILL)
        second.communicate()
        third = recall(client, "run", bad.worker_id)
        third.communicate()
        assert third.returncode == 2, "there is nothing to recall any more"
        assert wrong_ids(client, late) == set()
        items = feed(client, "late")
        assert len(items) == NUM_JOBS + len(wrong), "each is in the feed once more"
        assert {item.id for item in items[NUM_JOBS:]} == wrong
        assert bad.audit.reason is not None, "it stays quarantined"
