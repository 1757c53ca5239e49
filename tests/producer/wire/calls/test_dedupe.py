"""Equal jobs in flight run once: duplicates, their outcomes, and jobs that are not duplicates."""

from __future__ import annotations

import pytest

from pagemill import InvalidJob, Producer
from pagemill.producer.wire.calls import registry, transitions
from pagemill.producer.wire.schema.outputs import Progress
from tests.producer.driving import DECODE, Queue, delta, result_json

GREEDY = {"dedupe": True, "temperature": 0.0}


def left_behind(queue: Queue) -> set[str]:
    return {
        name
        for name in queue.names()
        if name.split(":")[0] in ("twin", "followers", "settling", "wait", "lanes", "turns")
    }


def test_a_follower_gets_the_leaders_result_as_its_own(queue: Queue) -> None:
    queue.submit("lead", metadata={"who": "leader"}, **GREEDY)
    queue.submit("follow", metadata={"who": "follower"}, batch_id="b", key="row", priority="low", **GREEDY)
    assert [job.job_id for job in queue.pull()] == ["lead"]
    status = queue.status("follow")
    assert (status.state, status.leader, status.position, status.error) == ("queued", "lead", None, None)
    assert registry.stats(queue.run, queue.name).followers == 1
    queue.lapse("lead")
    (job,) = queue.pull()
    progress = Progress(phase="decode", generated_tokens=3, max_tokens=3)
    body = result_json("lead", "text", metadata={"who": "leader"})
    call = transitions.commit(queue.name, "lead", job.token, "succeeded", body, progress=progress)
    assert [queue.run(call), queue.run(call)] == ["committed", "already_done"]
    copy = queue.result("follow")
    assert (copy.id, copy.text, copy.copied_from) == ("follow", "text", "lead")
    assert copy.metadata == {"who": "follower"}
    assert copy.timing.e2e_s is not None
    assert queue.result("lead").copied_from is None
    assert [name for name in queue.names() if name.startswith(("out:", "end:"))] == [
        f"end:{queue.client.hget(f'{queue.prefix}job:lead', 'shared').decode()}"
    ], "one copy"
    status = queue.status("follow")
    assert (status.state, status.attempt, status.progress.generated_tokens) == ("succeeded", 0, 3)
    counts = queue.counts("b")
    assert (counts.total, counts.succeeded) == (1, 1)
    assert left_behind(queue) == set()
    assert queue.submit("again", **GREEDY) == ["created"]
    assert queue.pull_one().job_id == "again", "only jobs in flight are deduplicated"


def test_cancelling_the_leader_makes_the_first_follower_run(queue: Queue) -> None:
    queue.submit("lead", "f1", "f2", "f3", **GREEDY)
    job = queue.pull_one()
    assert queue.cancel("lead") == "requested"
    assert queue.commit(job) == "cancelled"
    assert [queue.status(name).leader for name in ("f1", "f2", "f3")] == [None, "f1", "f1"]
    assert queue.cancel("f1") == "cancelled"
    assert queue.cancel("f3") == "cancelled"
    job = queue.pull_one()
    assert job.job_id == "f2"
    assert queue.commit(job) == "committed"
    assert [queue.state(name) for name in ("lead", "f1", "f2", "f3")] == [
        "cancelled",
        "cancelled",
        "succeeded",
        "cancelled",
    ]
    assert left_behind(queue) == set()


def test_a_follower_runs_at_its_own_rank(queue: Queue) -> None:
    queue.submit("lead", "follow", **GREEDY)
    queue.submit("later")
    queue.cancel("lead")
    assert [job.job_id for job in queue.pull()] == ["follow", "later"]


@pytest.mark.parametrize("end", ["failed", "expired"])
def test_an_end_of_the_leader_alone_is_not_shared(queue: Queue, end: str) -> None:
    queue.submit("lead", "follow", **GREEDY)
    queue.fail(queue.pull_one(), end)
    assert queue.state("follow") == "queued"
    assert queue.commit(queue.pull_one()) == "committed"


def test_death_is_shared(queue: Queue) -> None:
    queue.submit("lead", "follow", max_attempts=1, **GREEDY)
    assert queue.retry(queue.pull_one()) == "dead"
    assert queue.state("follow") == "dead"
    error = queue.error("follow")
    assert (error.code, error.cause) == ("attempts_exhausted", "engine_error")
    assert queue.client.zcard(f"{queue.prefix}dead") == 2
    assert left_behind(queue) == set()


def test_followers_wait_through_retries_and_crashes(queue: Queue) -> None:
    queue.submit("lead", "follow", **GREEDY)
    queue.retry(queue.pull_one(), 60)
    assert queue.pull() == []
    queue.submit("late", **GREEDY)
    assert queue.status("late").leader == "lead"
    queue.make_due("lead")
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1), progress=DECODE)
    queue.lapse("lead")
    job = queue.pull_one()
    assert job.job_id == "lead"
    queue.commit(job)
    assert [queue.state(name) for name in ("follow", "late")] == ["succeeded"] * 2


def test_a_followers_own_deadline_and_cancel_hold(queue: Queue) -> None:
    queue.submit("lead", **GREEDY)
    queue.submit("late", ttl=3600.0, **GREEDY)
    queue.submit("stopped", **GREEDY)
    job = queue.pull_one()
    assert queue.cancel("stopped") == "cancelled"
    queue.client.hset(f"{queue.prefix}job:late", "deadline", 1)
    assert queue.status("late").state == "expired", "nobody swept, who asks is told so"
    assert queue.commit(job) == "committed"
    assert [queue.state(name) for name in ("late", "stopped")] == ["expired", "cancelled"]
    assert registry.stats(queue.run, queue.name).followers == 0


def test_who_is_more_urgent_does_not_wait_behind_who_is_less(queue: Queue) -> None:
    queue.submit("low", priority="low", **GREEDY)
    queue.submit("high", priority="high", **GREEDY)
    assert queue.status("high").leader is None
    queue.submit("normal", **GREEDY)
    assert queue.status("normal").leader == "high"
    assert [job.job_id for job in queue.pull()] == ["high", "low"]
    queue.submit("urgent", priority="high", **GREEDY)
    assert queue.status("urgent").leader == "high", "it runs already"


def test_tenants_and_works_are_apart(queue: Queue) -> None:
    queue.submit("a", **GREEDY)
    queue.submit("b", tenant="other", **GREEDY)
    queue.submit("c", **GREEDY | {"prompt": "other"})
    queue.submit("d", **GREEDY | {"max_tokens": 99})
    queue.submit("e")
    queue.submit("f", delay=3600, **GREEDY)
    assert sorted(job.job_id for job in queue.pull()) == ["a", "b", "c", "d", "e"]


def test_a_seed_takes_part_where_it_is_used(queue: Queue) -> None:
    queue.submit("a", seed=1, **GREEDY)
    queue.submit("b", seed=2, **GREEDY)
    queue.submit("c", dedupe=True, seed=1)
    queue.submit("d", dedupe=True, seed=2)
    queue.submit("e", dedupe=True, seed=2)
    assert [job.job_id for job in queue.pull()] == ["a", "c", "d"]


def test_a_group_is_limited(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit(*(f"j{i}" for i in range(300)), **GREEDY)
    jobs = queue.pull()
    assert [job.job_id for job in jobs] == ["j0", "j257"]
    for job in jobs:
        queue.commit(job)
    queue.sweep(3)
    assert registry.stats(queue.run, queue.name).counts["succeeded"] == 300
    assert left_behind(queue) == set()


def test_a_whole_batch_is_cancelled(queue: Queue) -> None:
    with Producer(queue.url, queue=queue.name) as producer:
        batch = producer.submit_many({"prompt": "p", "model": "m"} | GREEDY for _ in range(600))
        (first, *_) = queue.pull(1)
        assert batch.cancel() == 600
        assert batch.counts().cancelled == 599
        assert queue.commit(first) == "cancelled"
        assert batch.counts().cancelled == 600
    assert left_behind(queue) == set()


def test_through_a_producer(queue: Queue) -> None:
    fields = {"prompt": "p", "model": "m"} | GREEDY
    with Producer(queue.url, queue=queue.name) as producer:
        batch = producer.submit_many([fields | {"key": f"k{i}", "metadata": {"row": i}} for i in range(5)])
        (job,) = queue.pull()
        queue.commit(job, "once")
        items = {item.key: item for item in batch.results()}
        assert {key: item.metadata for key, item in items.items()} == {f"k{i}": {"row": i} for i in range(5)}
        assert all(item.result and item.result.text == "once" for item in items.values())
        with pytest.raises(InvalidJob, match="temperature 0 or a seed"):
            producer.submit(prompt="p", model="m", dedupe=True)
