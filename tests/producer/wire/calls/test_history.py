"""A job's path through the queue as `history` reports it, on both servers."""

from __future__ import annotations

from pagemill.producer.wire.calls import outbox, registry, transitions
from pagemill.producer.wire.calls.history import JobHistory, history
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.producer.driving import DECODE, Queue, delta


def read(queue: Queue, job_id: str) -> JobHistory:
    found = queue.run(history(queue.name, job_id))
    assert found is not None
    return found


def outcomes(queue: Queue, job_id: str) -> list[str]:
    return [execution.outcome for execution in read(queue, job_id).executions]


def test_an_unknown_job_has_none(queue: Queue) -> None:
    assert queue.run(history(queue.name, "nobody")) is None


def test_a_job_that_runs_through_costs_no_list(queue: Queue) -> None:
    queue.submit("a")
    waiting = read(queue, "a")
    assert (waiting.state, waiting.executions) == ("queued", ())
    job = queue.pull_one(worker="w1")
    running = read(queue, "a").executions
    assert [(run.worker, run.attempt, run.outcome, run.ended_at) for run in running] == [
        ("w1", 1, "running", None)
    ]
    queue.commit(job)
    ended = read(queue, "a")
    (run,) = ended.executions
    assert (run.outcome, run.ended_at) == ("succeeded", ended.finished_at)
    assert ended.created_at <= (run.started_at or 0.0) <= (run.ended_at or 0.0)
    assert not queue.client.exists(f"{queue.prefix}history:a")


def test_every_execution_is_told_with_its_worker_and_its_end(queue: Queue) -> None:
    queue.submit("a")
    queue.retry(queue.pull_one(worker="w1"))
    assert outcomes(queue, "a") == ["retried"]
    queue.make_due("a")
    queue.release(queue.pull_one(worker="w2"))
    queue.pull_one(worker="w3")  # lost before it entered a step
    queue.lapse("a")
    queue.checkpoint(queue.pull_one(worker="w4"), progress=DECODE)  # entered a step without progress
    queue.lapse("a")
    last = queue.pull_one(worker="w5")
    queue.fail(last)
    told = read(queue, "a")
    assert [(run.worker, run.outcome) for run in told.executions] == [
        ("w1", "retried"), ("w2", "released"), ("w3", "lost"), ("w4", "crashed"), ("w5", "failed"),
    ]  # fmt: skip
    assert (told.executions[0].code, told.executions[0].message) == ("engine_error", "it broke")
    assert (told.executions[-1].code, told.executions[-1].message) == ("invalid_job", "no good")
    assert (told.attempts_failed, told.crashes) == (1, 1)
    times = [moment for run in told.executions for moment in (run.started_at, run.ended_at)]
    assert None not in times
    assert times == sorted(times, key=lambda moment: moment or 0.0)


def test_an_end_while_waiting_adds_no_execution(queue: Queue) -> None:
    queue.submit("a")
    queue.release(queue.pull_one())
    queue.cancel("a")
    assert read(queue, "a").state == "cancelled"
    assert outcomes(queue, "a") == ["released"]


def test_a_job_that_kills_its_workers_has_them_all(queue: Queue) -> None:
    queue.submit("a")
    for _ in range(5):
        queue.checkpoint(queue.pull_one(), progress=DECODE)
        queue.lapse("a")
    queue.sweep()
    assert read(queue, "a").state == "dead"
    assert outcomes(queue, "a") == ["crashed"] * 5


def test_the_list_is_bounded_and_keeps_the_last(queue: Queue) -> None:
    queue.submit("a")
    for number in range(40):
        queue.release(queue.pull_one(worker=f"w{number}"))
    workers = [run.worker for run in read(queue, "a").executions]
    assert workers == [f"w{number}" for number in range(8, 40)]


def test_a_long_message_of_many_bytes_is_cut_without_harm(queue: Queue) -> None:
    from pagemill.producer.wire.schema.outputs import ErrorInfo

    queue.submit("a")
    job = queue.pull_one()
    error = ErrorInfo(code="engine_error", message="é" * 5000, retryable=True)
    queue.run(transitions.retry(queue.name, "a", job.token, error, 0.0))
    (run,) = read(queue, "a").executions
    assert run.message.startswith("é" * 150)
    assert len(run.message) <= 400


def test_a_stop_that_is_asked_for_shows_until_it_is_done(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, 2))
    queue.cancel("a")
    told = read(queue, "a")
    assert (told.state, told.stop_asked) == ("running", "cancelled")
    assert told.progress.generated_tokens == 2
    queue.release(job)
    assert (read(queue, "a").stop_asked, outcomes(queue, "a")) == (None, ["cancelled"])


def test_it_goes_with_the_record(queue: Queue) -> None:
    queue.submit("a")
    queue.release(queue.pull_one())
    queue.commit(queue.pull_one())
    assert queue.client.pttl(f"{queue.prefix}history:a") > 0


def test_a_follower_names_its_leader(queue: Queue) -> None:
    queue.submit("a", "b", dedupe=True, temperature=0.0)
    leader = queue.pull_one()
    follower = "b" if leader.job_id == "a" else "a"
    assert (read(queue, follower).leader, read(queue, follower).executions) == (leader.job_id, ())
    queue.commit(leader)
    assert (read(queue, follower).state, outcomes(queue, follower)) == ("succeeded", [])


def test_it_says_how_many_workers_serve_the_model(queue: Queue) -> None:
    queue.submit("a")
    assert read(queue, "a").live_workers == 0
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("m",))))
    assert read(queue, "a").live_workers == 1


def test_the_tries_of_a_webhook_are_listed_without_its_url(queue: Queue) -> None:
    queue.submit("a", webhook="https://hooks.example.com/secret-path")
    queue.submit("plain")
    assert read(queue, "plain").webhook is None
    waiting = read(queue, "a").webhook
    assert waiting is not None
    assert (waiting.host, waiting.tries, waiting.next_at) == ("hooks.example.com", 0, None)
    for job in queue.pull():
        queue.commit(job)
    due = read(queue, "a").webhook
    assert due is not None
    assert due.next_at is not None
    (notice,) = queue.run(outbox.claim(queue.name, 10, 1000))
    reason = "failed: the receiver answered 500\x1b[2J" + "é" * 500
    queue.run(outbox.finish_delivery(queue.name, "a", notice.tries, 60_000, outcome=reason))
    failed = read(queue, "a").webhook
    assert failed is not None
    assert failed.next_at is not None
    assert failed.next_at > due.next_at + 30
    assert failed.tries == 1
    assert failed.outcome.startswith("failed: the receiver answered 500?[2J")
    assert len(failed.outcome.encode()) <= 300
    assert "secret-path" not in read(queue, "a").model_dump_json()
    queue.client.zadd(f"{queue.prefix}outbox", {"a": 1})
    (notice,) = queue.run(outbox.claim(queue.name, 10, 1000))
    queue.run(outbox.finish_delivery(queue.name, "a", notice.tries, None, outcome="delivered"))
    delivered = read(queue, "a").webhook
    assert delivered is not None
    assert (delivered.tries, delivered.outcome, delivered.next_at) == (2, "delivered", None)
