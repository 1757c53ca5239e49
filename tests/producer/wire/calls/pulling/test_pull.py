"""pull: the order of jobs, how many a worker gets, and when it gets none."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.producer.wire.calls import registry, submissions, transitions
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.calls.submissions import Submission
from tests.producer.driving import Queue, delta


def test_high_before_normal_before_low(queue: Queue) -> None:
    for priority in ("low", "normal", "high"):
        queue.submit(priority, priority=priority)
    assert [job.job_id for job in queue.pull()] == ["high", "normal", "low"]


def test_every_eighth_job_is_the_one_that_waited_longest(queue: Queue) -> None:
    queue.submit("old", priority="low")
    queue.client.hset(f"{queue.prefix}job:old", "at", 1)
    queue.submit(*(f"h{i}" for i in range(10)), priority="high")
    pulled = [job.job_id for job in queue.pull(10)]
    assert pulled.index("old") == 7


def test_tenants_take_turns(queue: Queue) -> None:
    queue.submit(*(f"a{i}" for i in range(4)), tenant="a")
    queue.submit(*(f"b{i}" for i in range(2)), tenant="b")
    assert [job.job_id for job in queue.pull()] == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_worker_gets_only_the_models_it_serves(queue: Queue) -> None:
    queue.submit("x", model="org/x:8b")
    queue.submit("m")
    assert [job.job_id for job in queue.pull()] == ["m"]
    assert [job.job_id for job in queue.pull(models=("a", "org/x:8b"))] == ["x"]


def test_pull_stops_at_the_credit_and_nothing_overtakes(queue: Queue) -> None:
    for job_id, max_tokens in (("a", 100), ("dear", 1000), ("b", 100)):
        queue.submit(job_id, max_tokens=max_tokens)
    assert [job.job_id for job in queue.pull(cost=500)] == ["a"]
    assert queue.pull(cost=500, holding=1) == []
    assert [job.job_id for job in queue.pull(cost=500)] == ["dear"], "an idle worker takes it at any cost"


def test_pull_takes_no_more_than_asked(queue: Queue) -> None:
    queue.submit("a", "b", "c")
    assert len(queue.pull(2)) == 2
    assert queue.pull(0) == []
    assert queue.run(transitions.pull(queue.name, "w", ["m"], 0, 0)).queued == 1


def test_a_paused_queue_gives_nothing_and_accepts_submits(queue: Queue) -> None:
    queue.run(registry.set_paused(queue.name, True))
    queue.submit("a")
    reply = queue.run(transitions.pull(queue.name, "w", ["m"], 1, 1000))
    assert (reply.jobs, reply.paused) == ([], True)
    queue.run(registry.set_paused(queue.name, False))
    assert queue.pull_one().job_id == "a"


def test_each_pull_issues_a_new_token_and_a_lease(queue: Queue) -> None:
    queue.submit("a")
    first = queue.pull_one()
    queue.release(first)
    second = queue.pull_one()
    assert second.token > first.token
    assert queue.client.zcard(f"{queue.prefix}leases") == 1


def submit_needing(queue: Queue, job_id: str, needs: str, lane_model: str = "m") -> None:
    header = f'{{"id":"{job_id}","lane":"{needs}:1:default:{lane_model}","cost":1}}'
    queue.run(submissions.submit(queue.name, [Submission(job_id, header.encode(), b'{"v":1}')]))


@pytest.mark.parametrize("needs", ["2", "1+after+wings", "1+wings"])
def test_a_job_that_needs_what_the_worker_does_not_know_waits_and_says_why(queue: Queue, needs: str) -> None:
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w", models=("m",), knows="1+after+store")))
    submit_needing(queue, "new", needs)
    queue.submit("old")
    assert [job.job_id for job in queue.pull()] == ["old"]
    status = queue.status("new")
    words = needs.removeprefix("1+").replace("+", ", ")
    assert status.state == "queued"
    assert status.error == f"no live worker of model m knows all that the job needs: {words}"
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="x", models=("m",), knows="1+after+wings+2")))
    assert queue.status("new").error is None


def test_a_job_released_for_an_ability_goes_to_a_worker_that_has_it(queue: Queue) -> None:
    queue.submit("scored")
    first = queue.pull_one()
    needs = ("score", "pool")
    assert queue.run(transitions.release(queue.name, "scored", first.token, needs)) == "released"
    assert queue.run(transitions.release(queue.name, "scored", first.token, needs)) == "already_done"

    def pull(*lacks: str) -> list[str]:
        call = transitions.pull(queue.name, "w", ["m"], 10, 1000, lacks=lacks)
        return [job.job_id for job in queue.run(call).jobs]

    assert pull("score") == []
    assert pull("pool", "tools") == []
    (second,) = queue.run(transitions.pull(queue.name, "w", ["m"], 10, 1000, lacks=["tools"])).jobs
    assert (
        queue.run(transitions.release(queue.name, "scored", second.token, ("score", "tools"))) == "released"
    )
    assert pull("tools") == []
    assert pull() == ["scored"]


def test_many_needs_hold_up_no_plain_job(queue: Queue) -> None:
    """A call checks some of them; unknown ids have no other effect on the rest."""
    for number in range(200):
        submit_needing(queue, f"new{number}", f"1+a{number}")
    queue.submit("old")
    assert [job.job_id for job in queue.pull()] == ["old"]
    queue.submit(*(f"high{number}" for number in range(3)), priority="high")
    assert len(queue.pull()) == 3


def test_needs_without_jobs_are_forgotten(queue: Queue) -> None:
    queue.submit("a")
    assert queue.client.zrange(f"{queue.prefix}needs:m", 0, -1) == [b"1:1"]
    queue.pull()
    assert not queue.client.exists(f"{queue.prefix}needs:m")
    queue.submit("b")
    assert [job.job_id for job in queue.pull()] == ["b"]


def test_a_job_whose_payload_is_gone_fails_alone(queue: Queue) -> None:
    queue.submit("a", "b")
    queue.client.delete(f"{queue.prefix}in:a")
    assert [job.job_id for job in queue.pull()] == ["b"]
    assert queue.state("a") == "failed"


def test_the_doorbell_rings_for_a_submit_and_is_silent_when_all_is_taken(queue: Queue) -> None:
    (bell,) = registry.doorbells(queue.name, ["m"])
    queue.submit("a")
    assert queue.client.llen(bell) == 1
    queue.pull(1)
    queue.pull(1)
    assert queue.client.llen(bell) == 0


@pytest.mark.parametrize(
    ("fields", "jobs"),
    [({}, 4), ({"n": 2}, 2), ({"best_of": 4}, 1), ({"beam_width": 2, "temperature": 0.0}, 2)],
)
def test_no_job_costs_more_than_its_sequences_can_have(
    queue: Queue, fields: dict[str, Any], jobs: int
) -> None:
    """For any max_tokens: it would occupy a complete worker."""
    queue.submit(*(f"j{i}" for i in range(5)), max_tokens=2**31 - 1, **fields)
    assert len(queue.pull(cost=410, longest=100, holding=1)) == jobs


def test_a_reply_is_bounded_in_bytes(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit(*(f"j{i}" for i in range(12)), prompt="x" * 1_000_000)
    first = queue.pull(64)
    assert 1 <= len(first) <= 6
    assert len(first) + len(queue.pull(64)) > len(first), "the next call goes on"


def test_checkpoints_count_as_bytes_of_a_reply(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit("a", "b", "c")
    for job in queue.pull():
        queue.checkpoint(job, delta(0, 1, text="x" * (3 << 20)))
        queue.release(job)
    assert len(queue.pull()) == 2
    assert len(queue.pull()) == 1
