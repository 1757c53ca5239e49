"""Completion estimates: their inputs, and how they learn from earlier estimates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagemill.producer.wire.calls import limits, registry, submissions, transitions
from pagemill.producer.wire.calls.estimates import (
    Estimate,
    EstimateInputs,
    JobDemand,
    WaitingLane,
    estimate_inputs,
    estimated_end,
)
from pagemill.producer.wire.calls.registry import Speed, WorkerInfo
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue, result_json

LANE = "1:1:default:m"
NOW = 1_000_000


def worker(*, rows: int = 4, busy: float = 10.0, free: float = 20.0) -> WorkerInfo:
    return WorkerInfo(id="w", models=("m",), speed=Speed(rows=rows, busy_rate=busy, free_rate=free))


def seen(
    *lanes: WaitingLane, running: int = 0, workers: tuple[WorkerInfo, ...] = (), **more: Any
) -> EstimateInputs:
    fields = {"is_paused": False, "rate": None, "kept": {"now": (), "later": ()}} | more
    return EstimateInputs(
        NOW, fields["is_paused"], fields["rate"], running, lanes, workers or (worker(),), fields["kept"]
    )


def lane(jobs: int, priority: str = "normal", tenant: str = "default", weight: float = 1.0) -> WaitingLane:
    return WaitingLane(priority, tenant, weight, jobs, 100.0)


def estimated(found: EstimateInputs, due: int = 0, rows: int = 1) -> Estimate:
    made = estimated_end(found, JobDemand(LANE, 100, due, None, rows))
    assert made is not None
    return made


def seconds(found: EstimateInputs, rows: int = 1) -> float:
    return estimated(found, rows=rows).estimate / 1000


def test_a_job_that_starts_at_once_takes_its_own_time() -> None:
    assert seconds(seen()) == 5.0
    assert seconds(seen(), rows=2) == 2.5
    assert estimated(seen(running=3)).kind == "now"


def test_a_job_that_waits_comes_after_what_is_before_it() -> None:
    full = {"running": 4}
    assert seconds(seen(**full)) == 10.0
    assert seconds(seen(lane(8), **full)) == 8 * 100 / 40 + 10
    assert seconds(seen(lane(8), lane(4, "high", "x"), **full)) == 12 * 100 / 40 + 10
    assert seconds(seen(lane(8), workers=(worker(), worker()), running=8)) == 8 * 100 / 80 + 10
    assert seconds(seen(lane(8), running=2)) == 6 * 100 / 40 + 10, "two of them start at once"


def test_tenants_have_turns_in_an_estimate_too() -> None:
    other = lane(1000, tenant="other")
    assert seconds(seen(lane(3), other, running=4)) == (3 + 4) * 100 / 40 + 10
    heavy = lane(1000, tenant="other", weight=3.0)
    assert seconds(seen(lane(3), heavy, running=4)) == (3 + 12) * 100 / 40 + 10


def test_limits_and_delays_count() -> None:
    assert seconds(seen(lane(8), running=4, rate=0.1)) == 80 + 10
    due = NOW + 15_000
    made = estimated(seen(lane(8), running=4), due)
    assert (made.start, made.estimate) == (due, 5_000 + 10_000), "what is before it runs meanwhile"


@pytest.mark.parametrize("found", [seen(workers=(WorkerInfo(id="w", models=("m",)),)), seen(is_paused=True)])
def test_what_is_not_known_is_not_estimated(found: EstimateInputs) -> None:
    assert estimated_end(found, JobDemand(LANE, 100, 0, None)) is None


def test_estimates_are_as_wide_as_earlier_ones_were_kept() -> None:
    first = estimated(seen())
    assert (first.p50, first.p90) == (5_000, 9_000)
    kept = {"now": (2.0,) * 100 + (4.0,) * 20, "later": ()}
    later = estimated(seen(kept=kept))
    assert (later.p50, later.p90) == (10_000, 20_000)
    waits = estimated(seen(running=4, kept=kept))
    assert waits.p50 == 10_000, "jobs that wait are scored apart"


def test_an_estimate_is_read_back() -> None:
    made = Estimate("later", 5, 10, 20, 30)
    assert Estimate.read(str(made)) == made
    for text in ("soon:1:2:3:4", "now:1:2:3", "now:1:2:3:x"):
        with pytest.raises(ValueError, match=r"estimate|invalid literal"):
            Estimate.read(text)


def test_a_header_says_when_a_job_is_due_and_has_to_end() -> None:
    header = {"id": "a", "lane": LANE, "cost": 7, "delay": 50, "ttl": 90, "deadline": NOW + 80, "n": 3}
    assert JobDemand.from_header(json.dumps(header).encode(), NOW) == JobDemand(
        LANE, 7, NOW + 50, NOW + 80, 3
    )


def announce(queue: Queue, info: WorkerInfo) -> None:
    queue.run(registry.heartbeat(queue.name, info))


def test_the_queue_tells_what_an_estimate_needs(queue: Queue) -> None:
    queue.submit(*(f"a{i}" for i in range(40)))
    queue.submit("b", tenant="b", max_tokens=95)
    queue.submit("high", priority="high")
    queue.submit("low", priority="low")
    queue.submit("elsewhere", model="n")
    queue.run(limits.set_weights(queue.name, {"b": 3}))
    queue.run(limits.set_limits(queue.name, limits.QueueLimits(rate=2.5)))
    announce(queue, worker())
    queue.pull(1)
    found = queue.run(estimate_inputs(queue.name, LANE))
    assert (found.running, found.rate, found.is_paused) == (1, 2.5, False)
    assert [one.speed for one in found.workers] == [worker().speed]
    cost = Job.parse({"prompt": "hello", "model": "m"}).cost_tokens()
    assert {(one.priority, one.tenant): (one.weight, one.jobs, one.mean_cost) for one in found.lanes} == {
        ("normal", "default"): (1.0, 40, cost),
        ("normal", "b"): (3.0, 1, 95.0 + cost - 16),
    }, "of the high one nothing waits, and low ones come after"


def submit_estimated(queue: Queue, job_id: str, estimate: str) -> str:
    item = submissions.prepare(Job.parse({"prompt": "hello", "model": "m"}), job_id)
    header = json.loads(item.header) | {"estimate": estimate}
    again = submissions.Submission(job_id, json.dumps(header).encode(), item.payload)
    return queue.run(submissions.submit(queue.name, [again]))[0].status


def test_jobs_with_an_estimate_teach_those_to_come(queue: Queue) -> None:
    now = int(queue.client.time()[0]) * 1000
    submit_estimated(queue, "a", f"later:{now - 10_000}:5000:1:1")
    submit_estimated(queue, "b", f"later:{now}:5000:1:1")
    queue.submit("c")
    first, second, third = queue.pull()
    assert (first.estimate, third.estimate) == (f"later:{now - 10_000}:5000:1:1", "")
    queue.commit(first)
    queue.commit(third)
    queue.fail(second)
    (ratio,) = queue.run(estimate_inputs(queue.name, LANE)).kept["later"]
    assert ratio > 1.8
    assert queue.run(estimate_inputs(queue.name, LANE)).kept["now"] == ()
    assert queue.client.pttl(f"{queue.prefix}kept:later:m") > 0


def test_what_was_learnt_is_bounded(valkey_queue: Queue) -> None:
    queue = valkey_queue
    for i in range(300):
        submit_estimated(queue, f"j{i}", "now:1:5000:1:1")
    while jobs := queue.pull(64):
        queue.transport.run_many(
            [
                transitions.commit(queue.name, job.job_id, job.token, "succeeded", result_json(job.job_id))
                for job in jobs
            ]
        )
    assert len(queue.run(estimate_inputs(queue.name, LANE)).kept["now"]) == 128


def test_an_estimate_of_another_form_is_refused(valkey_queue: Queue) -> None:
    for text in ("now", "now:1:2:3:x", "NOW:1:2:3:4", "now:" + "1" * 90 + ":2:3:4"):
        with pytest.raises(Exception, match="bad header"):
            submit_estimated(valkey_queue, "a", text)
    assert submit_estimated(valkey_queue, "a", "now:1:2:3:4") == "created"
