"""A worker's calls on a job it holds; every transition with its replay and with a stale token."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.calls import reads, transitions
from pagemill.producer.wire.schema.outputs import Progress
from tests.producer.driving import Queue, delta, result_json


def test_renew_extends_what_is_held_and_names_what_is_lost(queue: Queue) -> None:
    queue.submit("a", "b")
    a, b = queue.pull(lease_ms=60_000)
    before = queue.client.zscore(f"{queue.prefix}leases", "a")
    queue.release(b)
    held = [("a", a.token), ("b", b.token), ("c", 1)]
    reply = queue.run(transitions.renew(queue.name, "w1", held, 120_000))
    assert (reply.lost, reply.cancelled) == (["b", "c"], [])
    assert queue.client.zscore(f"{queue.prefix}leases", "a") > before


def test_renew_cannot_take_back_what_another_was_given(queue: Queue) -> None:
    queue.submit("a")
    old = queue.pull_one(worker="zombie")
    queue.lapse("a")
    new = queue.pull_one(worker="healthy")
    before = queue.client.zscore(f"{queue.prefix}leases", "a")
    reply = queue.run(transitions.renew(queue.name, "zombie", [("a", old.token)], 999_000))
    assert reply.lost == ["a"]
    assert queue.client.zscore(f"{queue.prefix}leases", "a") == before
    assert queue.commit(new) == "committed"


def test_renew_names_jobs_to_be_stopped(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.cancel("a")
    assert queue.run(transitions.renew(queue.name, "w1", [("a", job.token)])).cancelled == ["a"]


def test_checkpoint_appends_and_comes_back_with_the_next_pull(queue: Queue) -> None:
    queue.submit("a", n=2)
    job = queue.pull_one()
    assert queue.checkpoint(job, delta(0, 1, 2), delta(0, 7, index=1), fingerprint="f1") == "ok"
    assert queue.checkpoint(job, delta(2, 3)) == "ok"
    queue.release(job)
    checkpoint = queue.pull_one().checkpoint
    assert checkpoint is not None
    assert checkpoint.fingerprint == "f1"
    assert [(s.index, s.token_ids, s.text) for s in checkpoint.seqs] == [
        (0, (1, 2, 3), "xxx"),
        (1, (7,), "x"),
    ]


def test_a_replayed_checkpoint_is_ok_and_adds_nothing(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    assert [queue.checkpoint(job, delta(0, 1, 2)) for _ in range(2)] == ["ok", "ok"]
    assert queue.client.llen(f"{queue.prefix}ckpt:a") == 1


@pytest.mark.parametrize("wrong", [delta(1, 9), delta(4, 9), delta(0, 9), delta(0, 9, index=1)])
def test_a_wrong_offset_or_sample_is_refused_whole(queue: Queue, wrong: object) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, 2))
    assert queue.checkpoint(job, delta(2, 3), wrong) == "bad_offset"  # type: ignore[arg-type]
    assert queue.client.llen(f"{queue.prefix}ckpt:a") == 1


def test_a_stale_checkpoint_changes_nothing(queue: Queue) -> None:
    queue.submit("a")
    old = queue.pull_one()
    queue.release(old)
    new = queue.pull_one(worker="w2")
    assert queue.checkpoint(old, delta(0, 1)) == "stale"
    assert queue.checkpoint(new, delta(0, 5)) == "ok"
    assert queue.run(reads.feed(queue.name, "a", 0, 0)).deltas[0].token_ids == (5,)


def test_restart_drops_the_checkpoint_and_starts_a_new_epoch(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, 2))
    assert queue.checkpoint(job, delta(0, 9), restart=True) == "ok"
    feed = queue.run(reads.feed(queue.name, "a", 0, 1))
    assert (feed.epoch, [entry.token_ids for entry in feed.deltas]) == (1, [(9,)])


def test_progress_never_touches_the_state(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.checkpoint(job)
    status = queue.status("a")
    assert status.state == "running"
    assert status.progress.phase == "decode"
    assert status.progress.generated_tokens == 2
    assert status.progress.updated_at >= status.created_at


def test_commit_ends_the_job_once(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    assert queue.commit(job) == "committed"
    assert queue.commit(job, "another") == "already_done"
    assert queue.result("a").text == "ok"
    assert queue.client.zcard(f"{queue.prefix}leases") == 0


def test_a_commit_brings_the_progress_up_to_the_result(queue: Queue) -> None:
    queue.submit("a", "b")
    a, b = queue.pull()
    queue.checkpoint(a)
    last = Progress(phase="decode", prompt_tokens_done=4, prompt_tokens=4, generated_tokens=16, max_tokens=16)
    body = result_json("a")
    assert (
        queue.run(transitions.commit(queue.name, "a", a.token, "succeeded", body, progress=last))
        == "committed"
    )
    status = queue.status("a")
    assert (status.progress.generated_tokens, status.progress.updated_at) == (16, status.finished_at)
    queue.checkpoint(b)
    queue.fail(b)
    assert queue.status("b").progress.generated_tokens == 2, "without one the last that was written stays"


def test_a_stale_commit_is_fenced(queue: Queue) -> None:
    queue.submit("a")
    zombie = queue.pull_one(worker="zombie")
    queue.lapse("a")
    healthy = queue.pull_one(worker="healthy")
    assert queue.commit(zombie, "zombie") == "fenced"
    assert queue.commit(healthy, "healthy") == "committed"
    assert queue.commit(zombie, "zombie") == "fenced"
    assert queue.result("a").text == "healthy"


def test_a_commit_of_a_missing_or_returned_job_is_fenced(queue: Queue) -> None:
    assert queue.run(transitions.commit(queue.name, "none", 1, "succeeded", result_json("none"))) == "fenced"
    queue.submit("a")
    job = queue.pull_one()
    queue.release(job)
    assert queue.commit(job) == "fenced"
    assert queue.state("a") == "queued"


def test_a_late_commit_counts_while_nobody_else_was_given_the_job(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.lapse("a")
    assert queue.commit(job) == "committed"
    assert queue.pull() == []


def test_an_error_ends_the_job_with_its_code_and_partial_output(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, 2, text="hi"))
    assert queue.fail(job) == "committed"
    error = queue.error("a")
    assert (error.code, [(o.text, o.token_ids) for o in error.partial]) == ("invalid_job", [("hi", (1, 2))])


def test_an_ended_job_expires_and_keeps_no_payload(queue: Queue) -> None:
    queue.submit("a", metadata={"row": 1})
    queue.commit(queue.pull_one())
    assert "in:a" not in queue.names()
    for kind in ("job", "out", "md"):
        assert 86_000_000 < queue.client.pttl(f"{queue.prefix}{kind}:a") <= 86_400_000


def test_retry_delays_counts_and_keeps_the_rank(queue: Queue) -> None:
    queue.submit("a", "b")
    job = queue.pull_one()
    assert queue.retry(job, 60) == "retrying"
    assert queue.state("a") == "delayed"
    assert queue.status("a").error == "it broke"
    queue.make_due("a")
    again = queue.pull()
    assert [(job.job_id, job.attempt) for job in again] == [("a", 2), ("b", 1)]


def test_a_replayed_retry_counts_once(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    assert [queue.retry(job, 60), queue.retry(job, 60)] == ["retrying", "already_done"]
    queue.make_due("a")
    assert queue.pull_one().attempt == 2
    assert queue.retry(job) == "fenced"


def test_the_last_attempt_is_followed_by_death(queue: Queue) -> None:
    queue.submit("a", max_attempts=2)
    assert queue.retry(queue.pull_one()) == "retrying"
    queue.make_due("a")
    job = queue.pull_one()
    assert [queue.retry(job), queue.retry(job)] == ["dead", "already_done"]
    assert queue.run(reads.outcome(queue.name, "a")).state == "dead"
    error = queue.error("a")
    assert error.code == "attempts_exhausted"
    assert "it broke" in error.message
    assert queue.client.zscore(f"{queue.prefix}dead", "a") is not None


def test_retry_resumes_or_restarts(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1))
    queue.retry(job)
    queue.make_due("a")
    job = queue.pull_one()
    assert job.checkpoint is not None
    queue.retry(job, restart=True)
    queue.make_due("a")
    job = queue.pull_one()
    assert job.checkpoint is None
    assert queue.checkpoint(job, delta(0, 4)) == "ok"


def test_release_hands_back_at_the_old_rank_and_counts_nothing(queue: Queue) -> None:
    queue.submit("a", "b")
    job = queue.pull_one()
    queue.checkpoint(job)
    assert [queue.release(job), queue.release(job)] == ["released", "already_done"]
    again = queue.pull()
    assert [(job.job_id, job.attempt, job.crashes) for job in again] == [("a", 1, 0), ("b", 1, 0)]
    assert queue.release(job) == "fenced"
