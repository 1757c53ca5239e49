"""Rollouts, quotas, the ledger and the purge of a tenant, in combination."""

from __future__ import annotations

from pagemill.producer.client.purge.report import PurgeOptions
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import registry, rollouts, transitions
from pagemill.producer.wire.calls.metering import quotas, usage
from pagemill.producer.wire.calls.metering.quotas import Quota
from pagemill.producer.wire.calls.metering.usage import JobUsage
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.calls.rollouts import Rollout
from pagemill.producer.wire.calls.transitions import PulledJob
from tests.producer.driving import Queue, result_json

OLD, NEW = ("m", "m~r1"), ("m", "m~r2")


def roll_out(queue: Queue, share: float) -> None:
    for worker, revision in (("old", "r1"), ("new", "r2")):
        queue.run(registry.heartbeat(queue.name, WorkerInfo(id=worker, models=("m",), revision=revision)))
    assert queue.run(rollouts.start(queue.name, "m", Rollout("r2", share))) == "ok"


def pull(queue: Queue, worker: str, max_jobs: int = 100) -> list[PulledJob]:
    return queue.pull(max_jobs, worker=worker, models=NEW if worker == "new" else OLD)


def end(queue: Queue, job: PulledJob) -> None:
    call = transitions.commit(
        queue.name,
        job.job_id,
        job.token,
        "succeeded",
        result_json=result_json(job.job_id),
        used=JobUsage(prompt_tokens=3, completion_tokens=2),
    )
    assert queue.run(call) == "committed"


def names(count: int) -> list[str]:
    return [f"job-{number:03}" for number in range(count)]


def test_the_ledger_names_the_model_and_not_its_side(queue: Queue) -> None:
    roll_out(queue, 0.5)
    queue.submit(*names(40), tenant="acme")
    for worker in ("old", "new"):
        jobs = pull(queue, worker)
        assert len(jobs) > 5
        for job in jobs:
            end(queue, job)
    (day,) = queue.run(usage.days(queue.name))
    (row,) = queue.run(usage.rows(queue.name, day))
    assert (row.tenant, row.model, row.jobs, row.prompt_tokens) == ("acme", "m", 40, 120)


def test_a_quota_counts_both_sides(queue: Queue) -> None:
    queue.run(quotas.set_quotas(queue.name, {"acme": Quota(jobs_per_day=10)}))
    roll_out(queue, 0.5)
    queue.submit(*names(40), tenant="acme")
    queue.submit("other", tenant="other")
    taken = pull(queue, "new") + pull(queue, "old") + pull(queue, "new") + pull(queue, "old")
    assert len([job for job in taken if job.job_id != "other"]) == 10
    assert len(taken) == 11
    queue.run(quotas.set_quotas(queue.name, {"acme": Quota()}))
    rest: list[PulledJob] = []
    for _ in range(4):
        rest += pull(queue, "new") + pull(queue, "old")
    assert {job.job_id for job in taken + rest} == {*names(40), "other"}


def test_a_rolled_back_side_that_waits_for_a_quota_comes_back(queue: Queue) -> None:
    queue.run(quotas.set_quotas(queue.name, {"acme": Quota(jobs_per_day=1)}))
    roll_out(queue, 1.0)
    queue.submit(*names(10), tenant="acme")
    assert len(pull(queue, "new") + pull(queue, "new")) == 1
    assert queue.run(rollouts.roll_back(queue.name, "m")) == "ok"
    queue.run(quotas.set_quotas(queue.name, {"acme": Quota()}))
    found = [job.job_id for _ in range(4) for job in pull(queue, "old")]
    assert len(found) == 9


def test_a_purge_takes_what_a_canary_did_and_what_waits_for_a_quota(queue: Queue) -> None:
    queue.run(quotas.set_quotas(queue.name, {"acme": Quota(jobs_per_day=5)}))
    roll_out(queue, 1.0)
    queue.submit(*names(12), tenant="acme")
    queue.submit("theirs", tenant="other")
    for job in pull(queue, "new"):
        end(queue, job)
    assert pull(queue, "new") == []
    assert queue.client.exists(f"{queue.prefix}parked:acme")
    assert queue.client.llen(f"{queue.prefix}sampled:m") == 6
    with Producer(queue.url, queue=queue.name) as producer:
        options = PurgeOptions(wait_s=0.2, also=frozenset({"settings", "ledger"}))
        report = producer.purge_tenant("acme", options)
    assert report.remains == []
    assert queue.client.lrange(f"{queue.prefix}sampled:m", 0, -1) == [b"theirs"]
    (day,) = queue.run(usage.days(queue.name))
    assert [row.tenant for row in queue.run(usage.rows(queue.name, day))] == ["other"]
