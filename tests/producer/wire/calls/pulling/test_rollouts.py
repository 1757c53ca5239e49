"""A rollout: which workers get which jobs, in which order, and the counts of both sides."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from pagemill.common.error_codes import FINAL_CODES, RETRYABLE_CODES
from pagemill.producer.client.rollout import flow as flows
from pagemill.producer.wire.calls import registry, rollouts, transitions
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.calls.rollouts import Rollout, RolloutStatus
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import RolloutRefused
from pagemill.producer.wire.schema.outputs import ErrorInfo
from tests.producer.driving import Queue, delta
from tests.producer.wire.calls.pulling.test_pull import submit_needing

OLD, NEW = ("m", "m~r1"), ("m", "m~r2")


def alive(queue: Queue, *workers: str) -> None:
    """`old` and `new` are workers of the two revisions."""
    for worker in workers:
        revision = "r2" if worker.startswith("new") else "r1"
        info = WorkerInfo(id=worker, models=("m",), revision=revision)
        queue.run(registry.heartbeat(queue.name, info, ttl_ms=300_000))


def start(queue: Queue, share: float = 0.5, **more: object) -> None:
    assert queue.run(rollouts.start(queue.name, "m", Rollout("r2", share, **more))) == "ok"  # type: ignore[arg-type]


def status(queue: Queue) -> RolloutStatus:
    (found,) = queue.run(rollouts.statuses(queue.name))
    return found


def pull(queue: Queue, worker: str, max_jobs: int = 1000) -> list[PulledJob]:
    return queue.pull(max_jobs, worker=worker, models=NEW if worker.startswith("new") else OLD)


def taken(queue: Queue, worker: str, max_jobs: int = 1000) -> list[str]:
    return [job.job_id for job in pull(queue, worker, max_jobs)]


def drained(queue: Queue, worker: str) -> list[str]:
    """All jobs that the worker may have, in several pulls: one moves a bounded number of jobs to the other side."""
    found: list[str] = []
    for _ in range(20):
        found += taken(queue, worker)
    return found


def names(count: int, kind: str = "job") -> list[str]:
    return [f"{kind}-{number:04}" for number in range(count)]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_the_canary_gets_its_share_and_nobody_else_gets_it(queue: Queue, share: float) -> None:
    alive(queue, "old", "new")
    start(queue, share)
    queue.submit(*names(1000))
    canary, stable = taken(queue, "new"), taken(queue, "old")
    assert sorted(canary + stable) == names(1000)
    assert len(canary) == pytest.approx(1000 * share, abs=40 if 0 < share < 1 else 0)
    assert canary == sorted(canary)
    assert stable == sorted(stable)
    assert not any(name.startswith(("wait:", "alike:")) for name in queue.names())


def test_a_submit_decides_the_side_of_a_job(queue: Queue) -> None:
    """Jobs from before the rollout do not belong to the canary, and the decision for an id is repeatable."""
    alive(queue, "old", "new")
    queue.submit(*names(100, "before"))
    start(queue, 0.3)
    queue.submit(*names(300))
    canary = drained(queue, "new")
    assert 50 < len(canary) < 130
    stable = drained(queue, "old")
    assert stable[:100] == names(100, "before")
    assert sorted(stable[100:] + canary) == names(300)
    for name in names(300):
        queue.client.delete(f"{queue.prefix}job:{name}")
    queue.submit(*names(300))
    assert taken(queue, "new") == canary
    assert taken(queue, "old") == stable[100:]


def test_a_pull_moves_a_bounded_number_of_jobs(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit(*names(500))
    assert queue.run(rollouts.halt(queue.name, "m")) == "ok"
    assert taken(queue, "new", 1) == []
    assert queue.client.zcard(f"{queue.prefix}wait:1:1:default:m") == 64
    assert queue.run(rollouts.move_back(queue.name, "m")) == 500 - 64 - rollouts.MOVED_BACK
    assert taken(queue, "old", 1000) == names(64 + rollouts.MOVED_BACK + 64)


@pytest.mark.parametrize("able", ["old", "new"])
def test_a_job_goes_to_the_side_that_knows_its_words(queue: Queue, able: str) -> None:
    """For any share: the other side could never run it."""
    for worker, models in (("old", OLD), ("new", NEW)):
        knows = "1+after+wings" if worker == able else "1+after"
        info = WorkerInfo(id=worker, models=("m",), revision=models[1].partition("~")[2], knows=knows)
        queue.run(registry.heartbeat(queue.name, info, ttl_ms=300_000))
    start(queue, 1.0 if able == "old" else 0.0)
    submit_needing(queue, "needs", "1+wings")
    lane = "m" if able == "old" else "m~r2"
    assert queue.names() >= {f"wait:1+wings:1:default:{lane}"}


def test_a_canary_that_is_replaced_by_one_that_knows_less_strands_no_job(queue: Queue) -> None:
    def beat(worker: str, revision: str, knows: str) -> None:
        info = WorkerInfo(id=worker, models=("m",), revision=revision, knows=knows)
        queue.run(registry.heartbeat(queue.name, info, ttl_ms=300_000))

    beat("old", "r1", "1+store")
    beat("new", "r2", "1+store")
    start(queue, 1.0)
    submit_needing(queue, "needs", "1+store")
    queue.submit("plain")
    submit_needing(queue, "pinned", "1+store", lane_model="m~r2")
    assert taken(queue, "old") == [], "while its worker knows the word, the canary keeps its job"
    queue.run(registry.unregister(queue.name, "new"))
    beat("new2", "r2", "1")
    found = queue.pull(worker="old", models=OLD, has_store=True)
    assert [job.job_id for job in found] == ["needs"]
    assert taken(queue, "new2") == ["plain"]
    assert queue.state("pinned") == "queued", "a job that names the revision waits for it"
    assert not queue.client.zscore(f"{queue.prefix}canary:m", "needs")


def test_a_job_that_moves_back_keeps_its_affinity(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit("a", prompt="the same long beginning of all prompts " * 40)
    stable, canary = (f"{queue.prefix}wait:1:1:default:{name}" for name in ("m", "m~r2"))
    members = queue.client.zrange(canary, 0, -1)
    assert b" " in members[0]
    assert queue.run(rollouts.roll_back(queue.name, "m")) == "ok"
    assert queue.run(rollouts.move_back(queue.name, "m")) == 0
    assert queue.client.zrange(stable, 0, -1) == members


def test_a_canary_that_a_pulls_own_sweep_halts_gets_no_job(queue: Queue) -> None:
    alive(queue, "old", "new", "new2")
    start(queue, 1.0, least=1)
    queue.submit(*names(5))
    (lost,) = pull(queue, "new", 1)
    queue.checkpoint(lost)
    queue.lapse(lost.job_id)
    assert pull(queue, "new2") == []
    assert status(queue).state == "halted"
    assert len(drained(queue, "old")) == 5


def test_jobs_that_name_the_canary_stay_with_it(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit("named", revision="r2")
    queue.submit("other")
    assert queue.run(rollouts.roll_back(queue.name, "m")) == "ok"
    assert taken(queue, "new") == ["named"]
    assert taken(queue, "old") == ["other"]


def test_delayed_jobs_of_a_halted_canary_go_to_the_stable_side(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit("later", delay=60)
    queue.run(rollouts.halt(queue.name, "m"))
    assert queue.run(rollouts.move_back(queue.name, "m")) == 0
    queue.make_due("later")
    assert taken(queue, "new") == []
    assert taken(queue, "old") == ["later"]


def test_a_larger_share_keeps_what_the_smaller_one_had(queue: Queue) -> None:
    alive(queue, "old", "new")
    found = []
    for share in (0.2, 0.6):
        start(queue, share)
        queue.submit(*names(400))
        found.append(set(taken(queue, "new")))
        taken(queue, "old")
        for name in names(400):
            queue.client.delete(f"{queue.prefix}job:{name}")
    small, large = found
    assert small < large
    assert 200 < len(large) < 280


def test_another_share_holds_for_new_jobs(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit(*names(100))
    assert queue.run(rollouts.set_share(queue.name, "m", 0.0)) == "ok"
    queue.submit("later")
    assert drained(queue, "new") == names(100)
    assert drained(queue, "old") == ["later"]


@pytest.mark.parametrize("by", ["tenant", "batch"])
def test_a_tenant_or_a_batch_stays_on_one_side(queue: Queue, by: str) -> None:
    alive(queue, "old", "new")
    start(queue, 0.5, by=by)
    for number in range(30):
        where = {"tenant": f"t{number}"} if by == "tenant" else {"batch_id": f"b{number}"}
        queue.submit(*names(4, f"set{number}"), **where)  # type: ignore[arg-type]
    canary = {name.partition("-")[0] for name in taken(queue, "new")}
    stable = {name.partition("-")[0] for name in taken(queue, "old")}
    assert not canary & stable
    assert 5 < len(canary) < 25
    assert len(canary | stable) == 30


def test_a_side_that_nobody_serves_is_served_by_the_other(queue: Queue) -> None:
    alive(queue, "old")
    start(queue, 0.5)
    queue.submit(*names(100))
    assert sorted(taken(queue, "old")) == names(100)
    alive(queue, "new")
    queue.submit(*names(100, "more"))
    some = taken(queue, "new", 10)
    assert len(some) == 10
    queue.run(registry.unregister(queue.name, "new"))
    rest = drained(queue, "old")
    assert sorted(some + rest) == names(100, "more")
    queue.submit(*names(100, "again"))
    alive(queue, "new")
    queue.run(registry.unregister(queue.name, "old"))
    assert sorted(drained(queue, "new")) == names(100, "again")


def test_a_pinned_job_goes_to_its_revision_whatever_the_share(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit("a", revision="r1")
    assert taken(queue, "new") == []
    assert taken(queue, "old") == ["a"]
    start(queue, 0.0)
    queue.submit("b", revision="r2")
    assert taken(queue, "new") == ["b"]


def test_a_halted_canary_gets_nothing_until_its_share_is_set_again(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit(*names(20))
    assert queue.run(rollouts.halt(queue.name, "m")) == "ok"
    assert taken(queue, "new") == []
    assert taken(queue, "old", 5) == names(5)
    assert queue.run(rollouts.set_share(queue.name, "m", 1.0)) == "ok"
    queue.submit("later")
    assert taken(queue, "new") == ["later"]
    assert taken(queue, "old") == names(20)[5:]


def test_a_rollback_is_for_good(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit(*names(20))
    assert queue.run(rollouts.roll_back(queue.name, "m")) == "ok"
    queue.submit("later")
    assert taken(queue, "new") == []
    assert sorted(taken(queue, "old")) == [*names(20), "later"]
    assert queue.run(rollouts.set_share(queue.name, "m", 0.5)) == "over"
    queue.run(registry.unregister(queue.name, "old"))
    queue.submit("waits")
    assert taken(queue, "new") == []


def test_after_the_end_all_workers_take_all_jobs(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 0.5)
    queue.submit(*names(100))
    assert queue.run(rollouts.end(queue.name, "m")) == "ok"
    assert sorted(taken(queue, "old", 50) + taken(queue, "new")) == names(100)
    assert queue.run(rollouts.forget(queue.name, status(queue))) == "ok"
    assert queue.run(rollouts.statuses(queue.name)) == []


@pytest.mark.parametrize("other", ["start", "start and finish"])
@pytest.mark.parametrize("calls_before", range(4))
def test_finish_keeps_a_rollout_that_another_operator_starts_meanwhile(
    queue: Queue, calls_before: int, other: str
) -> None:
    """Another operator's commands run between any two calls of `finish`; no job is left without a worker."""
    alive(queue, "old", "new")
    start(queue)
    flow = flows.finish(queue.name, "m")
    reply, refused = None, False
    for number in range(10):
        if number == calls_before:
            time.sleep(0.002)  # an operator's commands are more than a millisecond apart
            start(queue)
            queue.submit(*names(40))
            if other == "start and finish":
                assert queue.run(rollouts.end(queue.name, "m")) == "ok"
        try:
            reply = queue.run(flow.send(reply))
        except StopIteration:
            break
        except RolloutRefused:
            refused = True
            break
    if other == "start" and calls_before > 0:
        assert refused
        assert status(queue).state == "open"
    assert sorted(drained(queue, "old") + drained(queue, "new")) == names(40)


def test_priorities_tenants_and_places_hold_on_each_side(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 0.5)
    queue.submit(*names(50, "low"), priority="low")
    queue.submit(*names(40, "a"), tenant="a")
    queue.submit(*names(40, "b"), tenant="b")
    queue.submit(*names(20, "high"), priority="high")
    for worker in ("old", "new"):
        order = taken(queue, worker)
        kinds = [name.partition("-")[0] for name in order]
        assert [kind for kind in kinds if kind in ("high", "low")] == sorted(
            kind for kind in kinds if kind in ("high", "low")
        )
        middle = [kind for kind in kinds if kind in "ab"]
        assert abs(middle[:20].count("a") - 10) <= 1
        assert kinds[-1] == "low"


@pytest.mark.parametrize("again", ["release", "retry", "lapse"])
def test_a_job_that_comes_back_stays_on_its_side(queue: Queue, again: str) -> None:
    alive(queue, "old", "new")
    start(queue, 0.5)
    queue.submit(*names(60))
    sides = {worker: pull(queue, worker) for worker in ("old", "new")}
    for jobs in sides.values():
        for job in jobs:
            if again == "lapse":
                queue.lapse(job.job_id)
            else:
                getattr(queue, again)(job)
    queue.run(transitions.sweep(queue.name, 200))
    for worker, jobs in sides.items():
        assert taken(queue, worker) == [job.job_id for job in jobs]


def half_done(queue: Queue, worker: str, share: float) -> PulledJob:
    """A job of which the worker has generated two tokens before it disappeared."""
    start(queue, share)
    queue.submit("a")
    (job,) = pull(queue, worker)
    assert queue.checkpoint(job, delta(0, 1, 2), fingerprint="f-" + worker) == "ok"
    return job


def test_a_half_generated_job_finishes_where_it_began(queue: Queue) -> None:
    alive(queue, "old", "new")
    job = half_done(queue, "old", 0.0)
    assert queue.run(rollouts.set_share(queue.name, "m", 1.0)) == "ok"
    queue.release(job)
    assert taken(queue, "new") == []
    (again,) = pull(queue, "old")
    assert again.fingerprint == "f-old"
    queue.release(again)
    queue.run(registry.unregister(queue.name, "old"))
    assert taken(queue, "new") == ["a"]


def test_a_half_generated_job_of_a_halted_canary_goes_to_the_stable_side(queue: Queue) -> None:
    alive(queue, "old", "new")
    job = half_done(queue, "new", 1.0)
    assert queue.run(rollouts.set_share(queue.name, "m", 0.0)) == "ok"
    queue.release(job)
    (again,) = pull(queue, "new")
    assert queue.run(rollouts.halt(queue.name, "m")) == "ok"
    queue.release(again)
    assert taken(queue, "new") == []
    assert taken(queue, "old") == ["a"]


def test_a_job_that_waits_at_the_canary_can_be_cancelled_and_expires(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit("a", "b")
    queue.submit("c", ttl=0.001)
    assert queue.status("b").position == 1
    assert queue.cancel("a") == "cancelled"
    assert queue.client.zcard(f"{queue.prefix}wait:1:1:default:m~") <= 2
    time.sleep(0.01)  # until "c" has expired
    assert taken(queue, "new") == ["b"]
    assert queue.state("c") == "expired"
    assert not any(name.startswith("wait:") for name in queue.names())


def test_followers_and_delayed_jobs_are_sided_as_well(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0)
    queue.submit("lead", "follow", temperature=0.0, dedupe=True)
    queue.submit("later", delay=60)
    assert queue.cancel("lead") == "cancelled"
    queue.make_due("later")
    queue.run(transitions.sweep(queue.name))
    assert taken(queue, "old") == []
    assert set(taken(queue, "new")) == {"follow", "later"}


def finish(queue: Queue, jobs: Sequence[PulledJob], failures: int) -> None:
    for number, job in enumerate(jobs):
        if number < failures:
            queue.fail(job, code="engine_error")
        else:
            queue.commit(job)


def test_each_side_is_counted(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 0.5, margin=1.0)
    queue.submit(*names(80))
    canary, stable = pull(queue, "new"), pull(queue, "old")
    finish(queue, canary, 3)
    finish(queue, stable, 1)
    found = status(queue)
    assert (found.canary.jobs, found.canary.failures) == (len(canary), 3)
    assert (found.stable.jobs, found.stable.failures) == (len(stable), 1)
    assert found.canary.run_p50_s is not None
    assert found.canary.run_p90_s is not None
    assert found.canary.run_p90_s >= found.canary.run_p50_s >= 0
    assert (found.canary.workers, found.stable.workers) == (1, 1)


def test_retries_and_crashes_count_as_failures_and_hand_backs_do_not(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0, margin=1.0)
    queue.submit(*names(4))
    retried, crashed, released, cancelled = pull(queue, "new")
    queue.retry(retried, 60.0)
    queue.checkpoint(crashed)
    queue.lapse(crashed.job_id)
    queue.run(transitions.sweep(queue.name))
    queue.release(released)
    queue.fail(cancelled, "cancelled")
    assert (status(queue).canary.jobs, status(queue).canary.failures) == (2, 2)


def test_a_canary_that_fails_more_often_is_halted(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 0.5, margin=0.1, least=20)
    queue.submit(*names(200))
    canary, stable = pull(queue, "new"), pull(queue, "old")
    finish(queue, stable, len(stable) // 10)
    finish(queue, canary[:19], 19)
    assert status(queue).state == "open"  # too few to decide
    queue.commit(canary[19])
    queue.fail(canary[20], code="engine_error")
    found = status(queue)
    assert (found.state, found.halted_for) == ("halted", "failures")
    queue.submit(*names(20, "more"))
    assert taken(queue, "new") == []
    assert len(taken(queue, "old")) == 20
    assert queue.run(rollouts.set_share(queue.name, "m", 0.5)) == "ok"
    assert status(queue).halted_for is None
    queue.fail(canary[21], code="engine_error")
    assert status(queue).state == "open"  # the count restarts


@pytest.mark.parametrize("code", sorted(FINAL_CODES | {"store_unavailable"}))
def test_errors_of_the_jobs_halt_no_canary(queue: Queue, code: str) -> None:
    alive(queue, "old", "new")
    start(queue, 1.0, margin=0.1, least=2)
    queue.submit(*names(4))
    for job in pull(queue, "new"):
        queue.fail(job, code=code)
    assert (status(queue).state, status(queue).canary.jobs) == ("open", 0)


@pytest.mark.parametrize("code", sorted(RETRYABLE_CODES - {"store_unavailable"}))
@pytest.mark.parametrize("attempts", [1, 2])
def test_errors_of_the_worker_or_the_model_halt_a_canary(queue: Queue, code: str, attempts: int) -> None:
    """Also in the last attempt, which ends the job with another code."""
    alive(queue, "old", "new")
    start(queue, 1.0, margin=0.1, least=2)
    queue.submit(*names(2), max_attempts=attempts)
    for job in pull(queue, "new"):
        error = ErrorInfo(code=code, message="no", retryable=True)  # type: ignore[arg-type]
        queue.run(transitions.retry(queue.name, job.job_id, job.token, error, 60.0))
    assert (status(queue).state, status(queue).canary.failures) == ("halted", 2)


def test_a_canary_within_the_margin_goes_on(queue: Queue) -> None:
    alive(queue, "old", "new")
    start(queue, 0.5, margin=0.1, least=20)
    queue.submit(*names(400))
    canary, stable = pull(queue, "new"), pull(queue, "old")
    finish(queue, stable[:100], 10)
    for block in range(0, 100, 20):  # one in five: 10 % + 10 %
        finish(queue, canary[block + 4 : block + 20], 0)
        finish(queue, canary[block : block + 4], 4)
    assert status(queue).state == "open"


@pytest.mark.slow
def test_a_canary_that_becomes_bad_late_is_halted_soon(queue: Queue) -> None:
    """Older results count less: 5,000 good jobs do not hide 150 bad ones."""
    alive(queue, "old", "new")
    start(queue, 1.0, margin=0.3)
    for block in range(10):
        queue.submit(*names(500, f"block{block}"))
        finish(queue, pull(queue, "new"), 0)
    queue.submit(*names(300, "bad"))
    for number, job in enumerate(pull(queue, "new")):
        queue.fail(job, code="engine_error")
        if status(queue).state == "halted":
            assert number < 200
            return
    pytest.fail("it was not halted")


def test_changes_may_be_sent_twice_and_say_what_they_met(queue: Queue) -> None:
    assert queue.run(rollouts.halt(queue.name, "m")) == "none"
    start(queue, 0.1)
    queue.client.hset(f"{queue.prefix}rollout:m", "canary:jobs", 7)
    start(queue, 0.1)
    assert status(queue).canary.jobs == 7
    assert queue.run(rollouts.start(queue.name, "m", Rollout("r3", 0.1))) == "busy"
    for call in (rollouts.halt(queue.name, "m"), rollouts.set_share(queue.name, "m", 0.2)):
        assert [queue.run(call) for _ in range(2)] == ["ok", "ok"]
    assert [queue.run(rollouts.roll_back(queue.name, "m")) for _ in range(2)] == ["ok", "ok"]
    assert queue.run(rollouts.halt(queue.name, "m")) == "over"
    assert queue.run(rollouts.start(queue.name, "m", Rollout("r3", 0.1))) == "ok"
