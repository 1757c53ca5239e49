"""cancel and sweep: jobs that are finished, lost, due or late."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.calls import reads, registry, transitions
from pagemill.producer.wire.schema.outputs import Progress
from tests.producer.driving import Queue, delta


def test_cancel_ends_a_waiting_job(queue: Queue) -> None:
    queue.submit("a")
    queue.submit("b", delay=3600)
    assert [queue.cancel(job_id) for job_id in ("a", "b", "a", "none")] == [
        "cancelled",
        "cancelled",
        "done",
        "missing",
    ]
    assert queue.pull() == []
    assert queue.state("a") == queue.state("b") == "cancelled"


def test_cancel_of_a_running_job_is_heard_and_wins_over_the_result(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    with queue.client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(f"{queue.prefix}cancel")
        pubsub.get_message(timeout=5)
        assert [queue.cancel("a"), queue.cancel("a")] == ["requested", "requested"]
        message = pubsub.get_message(timeout=5)
    assert message is not None
    assert message["data"] == b"a"
    assert queue.state("a") == "running"
    assert queue.checkpoint(job, delta(0, 1)) == "cancelled"
    assert queue.commit(job) == "cancelled"
    outcome = queue.run(reads.outcome(queue.name, "a"))
    assert outcome.state == "cancelled"
    assert outcome.error is not None
    assert outcome.error.partial[0].token_ids == (1,)


def test_a_cancelled_job_that_is_requeued_retried_or_lost_ends(queue: Queue) -> None:
    queue.submit("a", "b", "c")
    a, b, c = queue.pull()
    for job_id in "abc":
        queue.cancel(job_id)
    queue.lapse("c")
    assert (queue.release(a), queue.retry(b)) == ("cancelled", "cancelled")
    assert queue.run(transitions.sweep(queue.name)).cancelled == 1
    assert {queue.state(job_id) for job_id in "abc"} == {"cancelled"}
    assert queue.commit(c) == "fenced"


def test_a_lapsed_lease_goes_back_at_its_rank(queue: Queue) -> None:
    queue.submit("a", "b")
    queue.pull(1)
    queue.lapse("a")
    assert queue.run(transitions.sweep(queue.name)).reclaimed == 1
    assert queue.run(transitions.sweep(queue.name)).reclaimed == 0
    assert [job.job_id for job in queue.pull()] == ["a", "b"]


def test_a_live_lease_stays(queue: Queue) -> None:
    queue.submit("a")
    queue.pull()
    assert queue.run(transitions.sweep(queue.name)).reclaimed == 0
    assert queue.state("a") == "running"


def lose(queue: Queue, *, stepped: bool = True, advanced: bool = False, worker: str = "w1") -> None:
    """Pull the job, let it enter a step and possibly progress, and lose its worker."""
    job = queue.pull_one(worker=worker)
    length = sum(len(s.token_ids) for s in job.checkpoint.seqs) if job.checkpoint else 0
    if stepped:
        queue.checkpoint(job)
    if advanced:
        queue.checkpoint(job, delta(length, 1))
    queue.lapse(job.job_id)
    queue.run(transitions.sweep(queue.name))


def test_only_a_loss_in_a_step_without_advance_is_a_crash(queue: Queue) -> None:
    queue.submit("a")
    lose(queue, stepped=False)
    assert queue.status("a").crashes == 0
    lose(queue)
    lose(queue)
    assert queue.status("a").crashes == 2
    lose(queue, advanced=True)
    assert queue.status("a").crashes == 0


def test_waiting_progress_is_no_step(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.checkpoint(job, progress=Progress(phase="waiting"))
    queue.lapse("a")
    queue.run(transitions.sweep(queue.name))
    assert queue.status("a").crashes == 0


def test_a_suspect_runs_alone_and_dies_at_five_crashes(queue: Queue) -> None:
    queue.submit("poison")
    for _ in range(3):
        lose(queue)
    queue.submit("innocent")
    assert [job.job_id for job in queue.pull(holding=1)] == ["innocent"], "a busy worker leaves it alone"
    (suspect,) = queue.pull(worker="w2")
    assert (suspect.job_id, suspect.alone, suspect.crashes) == ("poison", True, 3)
    queue.submit("innocent2")
    assert queue.pull(worker="w2", holding=1) == [], "nothing runs beside a suspect"
    assert [job.job_id for job in queue.pull(worker="w3")] == ["innocent2"]
    queue.checkpoint(suspect)
    queue.lapse("poison")
    queue.run(transitions.sweep(queue.name))
    lose(queue, worker="w4")
    outcome = queue.run(reads.outcome(queue.name, "poison"))
    assert outcome.state == "dead"
    assert outcome.error is not None
    assert outcome.error.code == "crash_suspect"
    assert not any(key.startswith("suspects") for key in queue.names())


def test_a_suspect_that_advances_is_one_no_more(queue: Queue) -> None:
    queue.submit("a")
    for _ in range(3):
        lose(queue)
    lose(queue, advanced=True)
    assert queue.pull_one(holding=1).alone is False


def test_an_old_suspect_makes_one_busy_worker_run_empty(queue: Queue) -> None:
    queue.submit("poison")
    for _ in range(3):
        lose(queue)
    queue.client.hset(f"{queue.prefix}job:poison", "at", 1)
    queue.submit("a", "b")
    assert queue.pull(worker="w1", holding=1) == []
    assert [job.job_id for job in queue.pull(1, worker="w2", holding=1)] == ["a"]
    assert [job.job_id for job in queue.pull(worker="w1")] == ["poison"]


def test_a_deadline_ends_waiting_jobs(queue: Queue) -> None:
    queue.submit("a", deadline=1.0)
    queue.submit("b", delay=3600, ttl=3600.0)
    queue.client.zadd(f"{queue.prefix}deadlines", {"b": 1})
    assert queue.run(transitions.sweep(queue.name)).expired == 2
    assert queue.state("a") == queue.state("b") == "expired"
    assert queue.pull() == []


def test_ttl_is_a_deadline_from_the_submit(queue: Queue) -> None:
    queue.submit("a", ttl=60.0)
    queue.submit("b", ttl=60.0, deadline=2e9)
    for job_id in "ab":
        status = queue.status(job_id)
        assert status.deadline == pytest.approx(status.created_at + 60.0)


def test_a_deadline_stops_a_running_job_and_a_late_result_is_refused(queue: Queue) -> None:
    queue.submit("a", ttl=3600.0)
    job = queue.pull_one()
    assert job.deadline is not None
    queue.client.zadd(f"{queue.prefix}deadlines", {"a": 1})
    queue.run(transitions.sweep(queue.name))
    assert queue.run(transitions.renew(queue.name, "w1", [("a", job.token)])).cancelled == ["a"]
    assert queue.commit(job) == "expired"
    assert queue.state("a") == "expired"


def test_the_worker_may_end_a_job_at_its_deadline(queue: Queue) -> None:
    queue.submit("a", ttl=3600.0)
    assert queue.fail(queue.pull_one(), "expired") == "committed"
    assert queue.state("a") == "expired"
    assert "deadlines" not in queue.names()


def test_a_patient_sweep_leaves_fresh_losses_to_workers(queue: Queue) -> None:
    queue.submit("a")
    queue.pull_one()
    seconds, _ = queue.client.time()
    queue.client.zadd(f"{queue.prefix}leases", {"a": (seconds - 5) * 1000})
    assert queue.run(transitions.sweep(queue.name, patience_ms=10_000)).reclaimed == 0
    queue.client.zadd(f"{queue.prefix}leases", {"a": (seconds - 15) * 1000})
    assert queue.run(transitions.sweep(queue.name, patience_ms=10_000)).reclaimed == 1


def test_no_late_job_is_handed_out_and_none_stops_the_server(queue: Queue) -> None:
    """More are late than one sweep ends: pull ends some more, and reports that others may remain."""
    queue.submit(*(f"late{i}" for i in range(300)), ttl=3600.0)
    queue.submit("live")
    for i in range(300):
        queue.client.hset(f"{queue.prefix}job:late{i}", "deadline", 1)
    (bell,) = registry.doorbells(queue.name, ["m"])
    pulls = 0
    while not (jobs := queue.pull(1)):
        pulls += 1
        assert queue.client.llen(bell) > 0
    assert [job.job_id for job in jobs] == ["live"]
    assert 3 <= pulls <= 5
    assert registry.stats(queue.run, queue.name).counts["expired"] == 300
