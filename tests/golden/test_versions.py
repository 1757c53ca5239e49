"""This version and the released one before it, on one queue: each drains and takes over what the other left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.wire.calls import rollouts, transitions
from pagemill.producer.wire.calls.metering import quotas, usage
from pagemill.producer.wire.calls.reads import Outcome
from pagemill.producer.wire.calls.rollouts import Rollout
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.store.store import Store
from tests.conftest import ROOT
from tests.golden.cases import JOBS
from tests.golden.released import Release
from tests.worker.harness import QueueClient, eventually, process_settings

pytestmark = pytest.mark.slow

# Those that the echo model can run now, or refuses by itself.
RUNNABLE = [
    {"model": "echo", **{name: value for name, value in fields.items() if name not in {"run_at", "model"}}}
    for fields in JOBS.values()
    if "idempotency_key" not in fields and "key" not in fields
]
VERSIONS = ("released", "this")


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Release]:
    directory = tmp_path_factory.mktemp("released")
    return {"released": Release.unpacked(directory), "this": Release(ROOT, directory)}


@pytest.fixture
def client(valkey_url: str, queue_name: str) -> Iterator[QueueClient]:
    client = QueueClient(valkey_url, queue_name)
    yield client
    client.redis.close()


@contextmanager
def worker_of(release: Release, client: QueueClient, **settings: Any) -> Iterator[None]:
    process = release.worker(process_settings(client.url, client.queue, **settings))
    try:
        yield
    finally:
        process.kill()
        process.wait()


def drain(client: QueueClient, filled_by: Release, drained_by: Release) -> list[tuple[str, list[str]]]:
    """The end of each job: its state, and its texts or its error's code."""
    ids = filled_by.submit(client.url, client.queue, RUNNABLE)
    with worker_of(drained_by, client, model="echo"):
        outcomes = client.wait(ids)
        eventually(lambda: client.counts("batch").done, "the batch's end")
    counts = client.counts("batch")
    assert (counts.total, counts.succeeded) == (
        3 * len(RUNNABLE),
        3 * sum(outcome.state == "succeeded" for outcome in outcomes),
    )
    return [_end(outcome, fields) for outcome, fields in zip(outcomes, RUNNABLE, strict=True)]


def _end(outcome: Outcome, fields: Mapping[str, Any]) -> tuple[str, list[str]]:
    assert outcome.state is not None
    if outcome.result is not None:
        if fields.keys() & {
            "structured_outputs",
            "response_format",
        }:  # what an echo says there differs between releases
            return outcome.state, []
        return outcome.state, [output.text for output in outcome.result.outputs]
    assert outcome.error is not None
    return outcome.state, [outcome.error.code]


@pytest.fixture(scope="module")
def before(releases: dict[str, Release], valkey_url: str) -> list[tuple[str, list[str]]]:
    """The outcomes of the jobs under the released version alone."""
    client = QueueClient(valkey_url, "before")
    try:
        return drain(client, releases["released"], releases["released"])
    finally:
        client.redis.close()


@pytest.mark.parametrize(("filled_by", "drained_by"), [VERSIONS, VERSIONS[::-1]])
def test_a_queue_is_drained(
    filled_by: str,
    drained_by: str,
    releases: dict[str, Release],
    client: QueueClient,
    before: list[tuple[str, list[str]]],
) -> None:
    assert drain(client, releases[filled_by], releases[drained_by]) == before
    assert sum(state == "succeeded" for state, _ in before) > len(RUNNABLE) // 2


@pytest.mark.parametrize(("first", "second"), [VERSIONS, VERSIONS[::-1]])
def test_a_job_is_taken_over(
    first: str, second: str, releases: dict[str, Release], client: QueueClient
) -> None:
    (job_id,) = client.submit({"prompt": "0123456789" * 30, "max_tokens": 300})
    with worker_of(releases[first], client, model="echo:10"):
        eventually(lambda: client.generated(job_id) >= 20, "a checkpoint")
    assert not client.status(job_id).done
    with worker_of(releases[second], client, model="echo"):
        (outcome,) = client.wait([job_id])
    result = outcome.value()
    assert result is not None
    assert result.text == "0123456789" * 30
    assert result.resumed_tokens >= 20


def test_the_ledger_has_what_this_version_ends(releases: dict[str, Release], client: QueueClient) -> None:
    """The released one ends jobs by its own scripts, which count nothing, and hold nobody to a quota."""

    def counted() -> int:
        days = client.run(usage.days(client.queue))
        return sum(row.jobs for day in days for row in client.run(usage.rows(client.queue, day)))

    quota = quotas.Quota(jobs_per_day=2)
    with worker_of(releases["released"], client, model="echo"):
        outcomes = client.wait(client.submit(*[{"prompt": "abc", "max_tokens": 3}] * 3))
    assert [outcome.state for outcome in outcomes] == ["succeeded"] * 3
    assert counted() == 0
    client.run(quotas.set_quotas(client.queue, {"default": quota}))
    ids = client.submit(*[{"prompt": "abc", "max_tokens": 3}] * 3)
    with worker_of(releases["this"], client, model="echo"):
        client.wait(ids[:2])
        eventually(lambda: client.run(usage.totals(client.queue)).tenants_over_quota == 1, "a full quota")
    assert counted() == 2
    assert client.status(ids[2]).state == "queued"
    client.run(quotas.set_quotas(client.queue, {"default": quotas.Quota()}))
    client.run(transitions.sweep(client.queue))
    with worker_of(releases["released"], client, model="echo"):
        client.wait(ids)
    assert counted() == 2


@pytest.mark.parametrize(("asked", "alive"), [VERSIONS, VERSIONS[::-1]])
def test_workers_are_listed(
    asked: str, alive: str, releases: dict[str, Release], client: QueueClient
) -> None:
    with worker_of(releases[alive], client, model="echo"):
        (info,) = eventually(
            lambda: [one for one in client.workers() if one.state == "ready"], "the worker to be ready"
        )
        assert releases[asked].ready_workers(client.url, client.queue) == [info.id]


def test_a_task_that_the_released_version_lacks_waits_for_this_one(
    releases: dict[str, Release], client: QueueClient
) -> None:
    (score,) = client.submit({"task": "score", "prompt": "a", "continuations": ["b"], "priority": "high"})
    with worker_of(releases["released"], client, model="echo"):
        client.wait(client.submit({"prompt": "a"}))
        assert client.status(score).state == "queued"
    with worker_of(releases["this"], client, model="echo"):
        (outcome,) = client.wait([score])
    assert outcome.result is not None
    assert outcome.result.outputs[0].logprob == pytest.approx(-0.01)


def test_a_job_with_tools_is_never_taken_by_a_worker_that_would_leave_them_out(
    releases: dict[str, Release], client: QueueClient
) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    (asked,) = client.submit(
        {
            "messages": [{"role": "user", "content": call}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "priority": "high",
        }
    )
    with worker_of(releases["released"], client, model="echo"):
        client.wait(client.submit({"prompt": "a"}))
        assert client.status(asked).state == "queued"
    with worker_of(releases["this"], client, model="echo", tool_call_parser="hermes"):
        (outcome,) = client.wait([asked])
    assert outcome.result is not None
    assert [one.function.name for one in outcome.result.tool_calls] == ["f"]


def test_jobs_that_wait_for_others_live_beside_the_released_version(
    releases: dict[str, Release], client: QueueClient
) -> None:
    """It runs what they wait for, reads and cancels them, and never takes them."""
    released = releases["released"]
    parent, other = client.submit({"prompt": "0123", "max_tokens": 4}, {"prompt": "abcd", "max_tokens": 4})
    waits = {"prompt": "<{parent.text}>", "max_tokens": 20, "priority": "high"}
    child, unwanted, late = client.submit(
        waits | {"after": [parent]}, waits | {"after": [other]}, waits | {"after": [other]}
    )
    told = json.loads(released.command(client.url, client.queue, "status", child, "--json"))
    assert told["state"] == "delayed"
    released.command(client.url, client.queue, "cancel", unwanted)
    with worker_of(released, client, model="echo"):
        client.wait([parent, other])
        for job_id in (parent, other):  # a sweep of this version looks twice a minute
            client.redis.zadd(f"{keys.prefix(client.queue)}awaited", {job_id: 1}, xx=True)
        client.run(transitions.sweep(client.queue))
        assert [client.status(job_id).state for job_id in (child, unwanted, late)] == [
            "queued",
            "cancelled",
            "queued",
        ]
        client.wait(client.submit({"prompt": "a"}))
        assert client.status(child).state == "queued"
        released.command(client.url, client.queue, "cancel", late)
    with worker_of(releases["this"], client, model="echo"):
        (outcome,) = client.wait([child])
    assert outcome.result is not None
    assert outcome.result.text == "<0123>"
    told = json.loads(released.command(client.url, client.queue, "result", child, "--json"))
    assert told["outputs"][0]["text"] == "<0123>"
    assert not client.redis.keys(f"{keys.prefix(client.queue)}children:*")


def test_a_job_in_a_store_is_never_taken_by_a_worker_that_could_not_read_it(
    releases: dict[str, Release], client: QueueClient, tmp_path: Path
) -> None:
    """Nor its result given to a reader of that release, unless a worker was told to put results there."""
    prompt = "large " * 300
    with Producer(client.url, queue=client.queue, store=Store(f"file://{tmp_path}", 1500)) as producer:
        handle = producer.submit(prompt=prompt, model="echo", max_tokens=1900, priority="high")
        with worker_of(releases["released"], client, model="echo"):
            client.wait(client.submit({"prompt": "a"}))
            assert handle.status().state == "queued"
        with worker_of(releases["this"], client, model="echo", store_url=f"file://{tmp_path}"):
            assert handle.result(timeout=60).text == prompt
    assert client.redis.strlen(keys.outcome(client.queue, handle.id)) > len(prompt)


def test_an_upgrade_in_the_middle_of_a_rollout_loses_nothing(
    releases: dict[str, Release], client: QueueClient
) -> None:
    """Both releases on one queue, all workers killed but the last: each job is committed once."""
    jobs = [{"model": "echo", "prompt": f"{number:02} " * 20, "max_tokens": 60} for number in range(12)]
    with worker_of(releases["released"], client, model="echo:10", max_num_seqs=8):
        ids = releases["released"].submit(client.url, client.queue, jobs)
        eventually(lambda: any(client.generated(job_id) >= 5 for job_id in ids), "a checkpoint")
        with worker_of(releases["this"], client, model="echo:10", revision_name="v2", max_num_seqs=8):
            eventually(lambda: any(one.revision == "v2" for one in client.workers()), "the new worker")
            assert client.run(rollouts.start(client.queue, "echo", Rollout("v2", 0.5))) == "ok"
            ids += client.submit(*jobs)
            canary = [
                job_id
                for job_id in ids
                if client.redis.hget(keys.job(client.queue, job_id), "side") == b"canary"
            ]
            assert 0 < len(canary) < len(jobs)
            eventually(lambda: any(client.generated(job_id) >= 5 for job_id in canary), "the canary's first")
        released_status = releases["released"].command(
            client.url, client.queue, "status", canary[0], "--json"
        )
        assert json.loads(released_status)["state"] in ("queued", "running", "succeeded")
        (pinned,) = client.submit({"prompt": "a", "revision": "v2", "priority": "high"})
    with worker_of(releases["this"], client, model="echo", revision_name="v2"):
        outcomes = client.wait([*ids, pinned])
        eventually(lambda: client.counts("batch").done, "the batch's end")
    for outcome, fields in zip(outcomes, [*jobs, *jobs], strict=False):
        assert outcome.value() is not None
        assert outcome.result is not None
        assert outcome.result.text == fields["prompt"]
    counts = client.stats().counts
    assert counts["succeeded"] == 5 * len(jobs) + 1
    assert not any(counts.get(state) for state in ("failed", "dead", "queued", "running", "delayed"))
