"""Quotas of tenants, enforced by pull on the counts of the ledger."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from pagemill.producer.wire.calls import registry, submissions, transitions
from pagemill.producer.wire.calls.metering import quotas, usage
from pagemill.producer.wire.calls.metering.quotas import EVERYBODY, Quota, Remaining, TenantQuotas
from pagemill.producer.wire.calls.metering.usage import JobUsage
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.calls.transitions import PulledJob, PullReply
from pagemill.producer.wire.schema.errors import InvalidJob, RedisRefused
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.server.scripts import Call
from tests.producer.driving import Queue, result_json

MINUTE_MS = 60_000
COST = Job.parse({"prompt": "hello", "model": "m", "max_tokens": 100}).cost_tokens()
"""The tokens that a job of `submit` is charged when it starts."""


def limit(queue: Queue, tenant: str = "a", **limits: int) -> None:
    queue.run(quotas.set_quotas(queue.name, {tenant: Quota(**limits)}))


def submit(queue: Queue, *job_ids: str, tenant: str = "a", **fields: Any) -> None:
    assert set(queue.submit(*job_ids, tenant=tenant, max_tokens=100, **fields)) <= {"created"}


def names(count: int, kind: str = "job") -> list[str]:
    return [f"{kind}{number}" for number in range(count)]


def ids(jobs: list[PulledJob]) -> list[str]:
    return [job.job_id for job in jobs]


def commit(queue: Queue, job: PulledJob, tokens: int = 10) -> str:
    used = JobUsage(tokens, 0, 0, 0.0)
    return queue.run(
        transitions.commit(queue.name, job.job_id, job.token, "succeeded", result_json(job.job_id), used=used)
    )


def left(queue: Queue, of: str) -> Remaining:
    """The remainder of one of the tenant's limits."""
    found = getattr(queue.run(quotas.remaining(queue.name, ["a"]))["a"], of)
    assert found is not None
    return found


def pass_minutes(queue: Queue, minutes: float, tenant: str = "a") -> None:
    """Move the tenant's spending back by that time, and end its pause if that is enough."""
    parts = queue.client.get(f"{queue.prefix}spent:{tenant}").split()
    parts[2] = str(int(parts[2]) - round(minutes * MINUTE_MS)).encode()
    queue.client.set(f"{queue.prefix}spent:{tenant}", b" ".join(parts))
    if queue.client.zscore(f"{queue.prefix}parked", tenant) is not None:
        queue.client.zincrby(f"{queue.prefix}parked", -minutes * MINUTE_MS, tenant)


def test_quotas_of_a_later_release_are_read(queue: Queue) -> None:
    queue.client.hset(f"{queue.prefix}quotas", "a", "7 - - 9 - 11")
    assert queue.run(quotas.quotas(queue.name)) == {"a": Quota(tokens_per_minute=7, jobs_per_day=9)}
    assert quotas.read_lines([b"a 7 6 5 - - - - - - 9 8 1 - - - 11 10 0"]) == {
        "a": TenantQuotas(tokens_per_minute=Remaining(7, 6, 0.005), jobs_per_day=Remaining(9, 8, 0.001))
    }


def test_a_tenant_over_its_quota_waits_and_others_go_on(queue: Queue) -> None:
    limit(queue, jobs_per_minute=2)
    submit(queue, *(f"a{n}" for n in range(5)))
    submit(queue, *(f"b{n}" for n in range(5)), tenant="b")
    assert sorted(ids(queue.pull(10))) == ["a0", "a1", "b0", "b1", "b2", "b3", "b4"]
    assert queue.pull(10) == []
    pass_minutes(queue, 0.1)
    assert queue.pull(10) == []
    pass_minutes(queue, 0.45)
    assert ids(queue.pull(10)) == ["a2"], "half of a minute's two"


def test_tokens_are_taken_by_the_cost_and_put_back_by_what_was_used(queue: Queue) -> None:
    limit(queue, tokens_per_minute=3 * COST)
    submit(queue, *(f"a{n}" for n in range(8)))
    jobs = queue.pull(10)
    assert len(jobs) == 3
    commit(queue, jobs[0], 0)
    (again,) = queue.pull(10)  # immediately: unused tokens are available again
    commit(queue, again, COST)
    assert queue.pull(10) == []
    found = left(queue, "tokens")
    assert found.limit == 3 * COST
    assert found.remaining < COST


def test_a_days_quota_counts_what_the_ledger_counts(queue: Queue) -> None:
    limit(queue, tokens_per_day=3 * COST, jobs_per_day=10)
    submit(queue, *(f"a{n}" for n in range(20)))
    while jobs := queue.pull(1):
        commit(queue, jobs[0], 50)
    (day,) = queue.run(usage.days(queue.name))
    (row,) = queue.run(usage.rows(queue.name, day))
    assert left(queue, "tokens_per_day").remaining == 3 * COST - row.prompt_tokens
    assert 0 < 3 * COST - row.prompt_tokens < COST
    assert left(queue, "jobs_per_day").remaining == 10 - row.jobs
    pass_minutes(queue, 60.0)
    assert queue.pull(1) == [], "not before midnight"
    parts = queue.client.get(f"{queue.prefix}spent:a").split()
    queue.client.set(f"{queue.prefix}spent:a", b" ".join([*parts[:3], b"1", *parts[4:]]))
    queue.client.zadd(f"{queue.prefix}parked", {"a": 1})
    assert len(queue.pull(1)) == 1


def test_a_job_that_ends_on_another_day_counts_there(queue: Queue) -> None:
    limit(queue, tokens_per_day=3 * COST, jobs_per_day=10)
    submit(queue, "a0")
    job = queue.pull_one()
    queue.client.hset(f"{queue.prefix}job:a0", "charged", f"{COST} 1")
    queue.client.delete(f"{queue.prefix}spent:a")
    commit(queue, job, 50)
    assert left(queue, "tokens_per_day").remaining == 3 * COST - 50
    assert left(queue, "jobs_per_day").remaining == 9


def test_a_job_is_charged_once_however_often_it_runs(queue: Queue) -> None:
    limit(queue, jobs_per_day=2, tokens_per_day=2 * COST)
    submit(queue, "a0", "a1", "a2")
    for _ in range(3):
        (job,) = queue.pull(1)
        queue.release(job)
    (job,) = queue.pull(1)
    queue.lapse("a0")
    jobs = queue.pull(10, worker="w2")
    assert ids(jobs) == ["a0", "a1"]
    for job in jobs:
        commit(queue, job, 20)
        commit(queue, job, 20)
    assert left(queue, "tokens_per_day").remaining == 2 * COST - 40


def test_a_job_over_the_whole_quota_starts_alone(queue: Queue) -> None:
    limit(queue, tokens_per_minute=COST // 2)
    submit(queue, "a0", "a1")
    (job,) = queue.pull(10)
    assert queue.pull(10) == []
    commit(queue, job, COST // 2)
    assert queue.pull(10) == []
    pass_minutes(queue, 1.0)
    assert ids(queue.pull(10)) == ["a1"]


def test_what_waits_for_a_quota_is_taken_in_its_order(queue: Queue) -> None:
    """Also a large job, which smaller jobs of its tenant never overtake."""
    limit(queue, tokens_per_minute=6 * COST)
    submit(queue, "a0", "a1", "a2", "a3")
    queue.submit("large", tenant="a", max_tokens=6 * COST)
    submit(queue, "small")
    assert ids(queue.pull(10)) == ["a0", "a1", "a2", "a3"]
    pass_minutes(queue, 0.1)
    assert queue.pull(10) == []
    pass_minutes(queue, 0.7)
    assert ids(queue.pull(10)) == ["large"]


def test_the_default_holds_for_each_tenant_without_its_own(queue: Queue) -> None:
    limit(queue, EVERYBODY, jobs_per_day=1)
    limit(queue, "big", jobs_per_day=3)
    for tenant in ("x", "y", "big"):
        submit(queue, *(f"{tenant}{n}" for n in range(4)), tenant=tenant)
    assert sorted(ids(queue.pull(20))) == ["big0", "big1", "big2", "x0", "y0"]
    assert queue.run(quotas.quotas(queue.name)) == {
        EVERYBODY: Quota(jobs_per_day=1),
        "big": Quota(jobs_per_day=3),
    }


def test_a_higher_quota_holds_at_once_and_none_frees_all(queue: Queue) -> None:
    limit(queue, jobs_per_day=1)
    submit(queue, *(f"a{n}" for n in range(5)))
    assert len(queue.pull(10)) == 1
    assert queue.pull(10) == []
    limit(queue, jobs_per_day=2)
    assert len(queue.pull(10)) == 1
    limit(queue)
    assert len(queue.pull(10)) == 3
    assert queue.run(quotas.quotas(queue.name)) == {}
    queue.run(quotas.set_quotas(queue.name, {"b": Quota()}))
    assert not queue.client.hexists(f"{queue.prefix}meta", "quotas")


def test_every_class_and_model_of_the_tenant_waits_and_comes_back(queue: Queue) -> None:
    limit(queue, jobs_per_minute=1)
    for model in ("m", "other"):
        for priority in ("high", "normal", "low"):
            submit(queue, f"{model}-{priority}", model=model, priority=priority)
    found = []
    for _ in range(6):
        jobs = queue.pull(10, models=("m", "other"))
        assert len(jobs) == 1
        assert queue.pull(10, models=("m", "other")) == []
        found += ids(jobs)
        pass_minutes(queue, 1.0)
    assert len(set(found)) == 6
    assert {name.split("-")[1] for name in found[:2]} == {"high"}


def test_several_workers_never_run_more_jobs_of_a_tenant_than_its_cap(queue: Queue) -> None:
    """Jobs stop in every possible way, and start again as soon as one has stopped."""
    cap, rng = 3, random.Random(7)
    limit(queue, running=cap)
    submit(queue, *names(60))
    submit(queue, *names(40, "other"), tenant="b")
    running: dict[str, PulledJob] = {}
    most = {"a": 0, "b": 0}
    ended = 0
    while ended < 100:
        for worker in ("w1", "w2", "w3"):
            running |= {job.job_id: job for job in queue.pull(rng.randint(1, 4), worker=worker)}
        ours = [job_id for job_id in running if not job_id.startswith("other")]
        most = {"a": max(most["a"], len(ours)), "b": max(most["b"], len(running) - len(ours))}
        assert len(ours) <= cap
        assert running, "something may always run"
        assert left(queue, "running").remaining == cap - len(ours)
        job = running.pop(rng.choice(sorted(running)))
        match rng.randrange(5):
            case 0:
                queue.release(job)
            case 1:
                queue.lapse(job.job_id)
            case 2:
                assert queue.fail(job) == "committed"
                ended += 1
            case _:
                assert queue.commit(job) == "committed"
                ended += 1
    assert most["a"] == cap
    assert most["b"] > cap
    assert not queue.client.exists(f"{queue.prefix}runs")


def test_a_cap_counts_jobs_that_ran_before_it_was_set_and_says_why_others_wait(queue: Queue) -> None:
    submit(queue, *names(4))
    first, second = queue.pull(2)
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("m",))))
    limit(queue, running=2)
    assert queue.pull() == []
    waiting = names(4)[2]
    assert queue.status(waiting).error == (
        "tenant a already runs as many jobs as it may; see pagemill queue quota a"
    )
    assert queue.cancel(first.job_id) == "requested"
    assert queue.pull() == [], "until its worker has stopped it"
    queue.commit(first)
    assert ids(queue.pull()) == [waiting]
    limit(queue, running=3)
    assert ids(queue.pull()) == [names(4)[3]]
    limit(queue, running=2)
    queue.commit(second)
    limit(queue)
    assert not queue.client.exists(f"{queue.prefix}runs")


def test_parked_lanes_cost_a_pull_nothing(queue: Queue) -> None:
    """A pull makes as many server calls with 300 parked tenants as with one."""
    limit(queue, EVERYBODY, jobs_per_day=1)
    park_tenants(queue, 0, 1)
    calls = calls_of_a_pull(queue)
    park_tenants(queue, 1, 300)
    assert queue.client.zcard(f"{queue.prefix}parked") == 300
    assert calls_of_a_pull(queue) == calls


def park_tenants(queue: Queue, first: int, end: int) -> None:
    for number in range(first, end):
        submit(queue, f"first{number}", f"second{number}", tenant=f"t{number}")
    for _ in range(20):
        assert all(job.job_id.startswith("first") for job in queue.pull(50))


def calls_of_a_pull(queue: Queue) -> int:
    queue.client.config_resetstat()
    assert queue.pull(50) == []
    return sum(found["calls"] for found in queue.client.info("commandstats").values())


def test_the_worker_is_told_when_a_quota_has_room(queue: Queue) -> None:
    limit(queue, jobs_per_minute=2)
    submit(queue, "a0", "a1", "a2")
    assert len(queue.pull(10)) == 2
    reply: PullReply = queue.run(transitions.pull(queue.name, "w1", ["m"], 10, 10**6))
    assert reply.next_due_ms is not None
    assert 20_000 < reply.next_due_ms <= 30_000
    assert reply.limited_ms is None, (
        "a worker that waits for the rate would not hear of another tenant's jobs"
    )


def test_what_waits_for_a_quota_or_another_worker_is_not_said_to_lack_room(queue: Queue) -> None:
    """A worker that is notified of waiting jobs, and gets none, assumes that its KV blocks are the reason."""
    limit(queue, jobs_per_minute=1)
    submit(queue, "a0", "a1")
    submit(queue, "b0", tenant="b", model="other")
    assert len(queue.pull(10)) == 1

    def waiting(cost: int) -> int:
        return queue.run(transitions.pull(queue.name, "w1", ["m"], 10, cost, holding=1)).queued

    assert waiting(10**6) == 0
    submit(queue, "c0", tenant="c")
    assert waiting(1) == 3


def test_a_suspect_is_charged_like_others(queue: Queue) -> None:
    """It started before, so its own spending never holds it back."""
    limit(queue, jobs_per_day=1)
    submit(queue, "a0", "a1")
    job = queue.pull_one()
    queue.client.hset(f"{queue.prefix}job:a0", mapping={"stepped": 1, "crashes": 2})
    queue.lapse("a0")
    (job,) = queue.pull(10, worker="w2")
    assert (job.job_id, job.alone) == ("a0", True)


def test_a_clock_that_was_set_back_parks_nobody_for_long(queue: Queue) -> None:
    limit(queue, jobs_per_minute=1)
    submit(queue, "a0", "a1")
    queue.pull(1)
    assert queue.pull(1) == []
    future = (time.time() + 10 * 86_400) * 1000
    queue.client.zadd(f"{queue.prefix}parked", {"a": future})
    queue.client.delete(f"{queue.prefix}spent:a")
    assert ids(queue.pull(1)) == ["a1"]


def test_submit_says_what_is_left(queue: Queue) -> None:
    job = Job.parse({"prompt": "hello", "model": "m", "tenant": "a"})
    others = Job.parse({"prompt": "hello", "model": "m", "tenant": "b"})

    def send(number: int) -> list[TenantQuotas | None]:
        items = [submissions.prepare(each, f"{each.tenant}{number}") for each in (job, others)]
        return [reply.left for reply in queue.run(submissions.submit(queue.name, items))]

    assert send(0) == [None, None]
    limit(queue, jobs_per_minute=5, tokens_per_day=10_000)
    assert send(1) == [
        TenantQuotas(jobs_per_minute=Remaining(5, 5, 0.0), tokens_per_day=Remaining(10_000, 10_000, 0.0)),
        None,
    ]
    for pulled in queue.pull(10):
        commit(queue, pulled, 100)
    found, none = send(2)
    assert none is None
    assert found is not None
    assert found.jobs is not None
    assert found.jobs.limit == 5
    assert 3 <= found.jobs.remaining < 5
    assert 0.0 < found.jobs.reset_s <= 24.0
    assert found.tokens is not None
    assert found.tokens.remaining == 10_000 - 200


def test_a_bad_quota_is_refused(queue: Queue) -> None:
    for wanted in ({"a": Quota(jobs_per_day=0)}, {"a": Quota(jobs_per_day=10**13)}, {"a b": Quota()}):
        with pytest.raises(InvalidJob):
            quotas.set_quotas(queue.name, wanted)
    for args in (("a", "1 2 3"), ("a", "1 2 3 x"), ("a", "0 - - -"), ("a b", ""), ("a",)):
        with pytest.raises(RedisRefused):
            queue.run(Call("quotas", (queue.prefix,), args, lambda reply: reply))
    assert queue.run(quotas.quotas(queue.name)) == {}


def test_a_job_behind_one_that_begins_alike_does_not_hold_back_one_that_was_charged(queue: Queue) -> None:
    """The worker prefers the prefix of `a2`, which does not fit: `a0`, which was requeued, is older."""
    limit(queue, jobs_per_day=2)
    submit(queue, "a0", prompt="x" * 300)
    submit(queue, "a1", "a2", prompt="y" * 300)
    assert ids(queue.pull(1)) == ["a0"]
    assert ids(queue.pull(1)) == ["a1"]
    queue.lapse("a0")
    assert ids(queue.pull(10)) == ["a0"]
    assert queue.pull(10) == []


def test_a_clock_that_is_set_back_holds_no_minute_up(queue: Queue) -> None:
    limit(queue, jobs_per_minute=1)
    submit(queue, "a0", "a1")
    assert ids(queue.pull(10)) == ["a0"]
    pass_minutes(queue, -120.0)
    assert ids(queue.pull(10)) == ["a1"]


def test_a_pause_is_looked_at_again(queue: Queue) -> None:
    """A day's quota is hours away; the clock is checked every ten minutes."""
    limit(queue, jobs_per_day=1)
    submit(queue, "a0", "a1")
    assert ids(queue.pull(10)) == ["a0"]
    due = queue.client.zscore(f"{queue.prefix}parked", "a")
    assert due is not None
    assert 0 < due - time.time() * 1000 <= 10 * MINUTE_MS
    queue.client.zadd(f"{queue.prefix}parked", {"a": 1})
    assert queue.pull(10) == []
    assert queue.client.zscore(f"{queue.prefix}parked", "a") > time.time() * 1000


def test_neither_ledger_nor_quotas_count_an_operators_copy(queue: Queue) -> None:
    limit(queue, jobs_per_day=1)
    submit(queue, "a0")
    commit(queue, queue.pull_one())
    job = Job.parse({"prompt": "hello", "model": "m", "tenant": "a", "max_tokens": 100})
    queue.run(submissions.submit(queue.name, [submissions.prepare(job, "copy").uncounted()]))
    commit(queue, queue.pull_one())
    (day,) = queue.run(usage.days(queue.name))
    (row,) = queue.run(usage.rows(queue.name, day))
    assert row.jobs == 1
    assert left(queue, "jobs_per_day").remaining == 0


def test_a_job_over_the_quota_is_looked_at_once_in_a_call(own_queue: Queue) -> None:
    queue = own_queue
    limit(queue, jobs_per_minute=1)
    submit(queue, "a1", "a2")
    assert ids(queue.pull(1)) == ["a1"]
    queue.client.config_resetstat()
    assert queue.pull(50) == []
    assert queue.client.info("commandstats")["cmdstat_hgetall"]["calls"] == 1
