"""Canaries: agreement, deviation, and the jobs that a worker committed since its last good canary."""

from __future__ import annotations

import random

import pytest

from pagemill.producer.wire.calls import audit, purge
from pagemill.producer.wire.calls.audit import AuditView
from tests.producer.driving import Queue

MIB = 1 << 20


def look(queue: Queue, worker: str, input_bytes: int = MIB) -> AuditView:
    return queue.run(audit.view(queue.name, worker, "f", input_bytes))


def vote(queue: Queue, worker: str, answer: str, position: int = 0) -> str:
    """Vote until the compared results are the existing ones; returns the verdict."""
    while True:
        view = queue.run(audit.view(queue.name, worker, "f", MIB, with_answers=True))
        verdict, _ = queue.run(audit.vote(queue.name, worker, "f", answer, len(view.answers), position))
        if verdict != "changed":
            return verdict


def trail(queue: Queue, worker: str) -> list[str]:
    return [entry.decode() for entry in queue.client.lrange(f"{queue.prefix}did:{worker}", 0, -1)]


def committed(queue: Queue, worker: str, *job_ids: str, **fields: object) -> None:
    queue.submit(*job_ids, **fields)
    for job in queue.pull(len(job_ids), worker=worker):
        queue.commit(job)


def test_the_first_proposes_and_the_second_confirms(queue: Queue) -> None:
    assert vote(queue, "w1", "x") == "alone"
    assert vote(queue, "w1", "x") == "alone", "nobody else has answered"
    assert vote(queue, "w2", "x") == "clean"
    assert vote(queue, "w1", "x") == "clean"
    assert vote(queue, "w3", "y") == "deviates"
    assert look(queue, "w3").state == "quarantined"
    assert look(queue, "w1").state == ""


def test_a_third_worker_decides_a_dispute(queue: Queue) -> None:
    assert vote(queue, "bad", "y") == "alone"
    assert vote(queue, "w1", "x") == "disputed"
    assert (look(queue, "bad").state, look(queue, "w1").state) == ("disputed", "disputed")
    assert not look(queue, "w1").is_wanted
    assert look(queue, "w2").is_wanted, "its answer decides"
    assert vote(queue, "w2", "x") == "clean"
    assert look(queue, "bad").state == "quarantined"
    assert look(queue, "w1").state == ""
    assert not look(queue, "w3").is_wanted
    assert vote(queue, "bad", "x") == "deviates", "a quarantine is not over by itself"


def test_a_worker_that_contradicts_itself_needs_no_second(queue: Queue) -> None:
    assert vote(queue, "w1", "x") == "alone"
    assert vote(queue, "w1", "y") == "deviates"


def test_a_vote_on_old_answers_is_asked_again(queue: Queue) -> None:
    vote(queue, "w1", "x")
    assert queue.run(audit.vote(queue.name, "w2", "f", "x", 0, 0))[0] == "changed"


def test_answers_have_a_bound(queue: Queue) -> None:
    verdicts = [vote(queue, f"w{number}", f"answer {number}") for number in range(12)]
    assert verdicts == ["alone"] + ["disputed"] * 7 + ["deviates"] * 4
    assert len(queue.client.hgetall(f"{queue.prefix}agreed:f")) <= 8 + 8 + 2


def test_only_an_audited_workers_jobs_are_listed(queue: Queue) -> None:
    committed(queue, "w1", "a")
    assert trail(queue, "w1") == []
    look(queue, "w1")
    committed(queue, "w1", "b", "c")
    queue.submit("d")
    queue.fail(queue.pull_one(worker="w1"))
    committed(queue, "w2", "e")
    assert [entry.split()[0] for entry in trail(queue, "w1")] == ["b", "c"]
    assert look(queue, "w1").position == 2


def test_a_clean_canary_clears_what_came_before_it(queue: Queue) -> None:
    vote(queue, "w2", "x")
    look(queue, "w1")
    committed(queue, "w1", "a", "b")
    before = look(queue, "w1").position
    committed(queue, "w1", "c")
    assert vote(queue, "w1", "x", before) == "clean"
    look(queue, "w1")
    assert [entry.split()[0] for entry in trail(queue, "w1")] == ["c"]
    assert look(queue, "w1").position == 3
    names = queue.names()
    assert "in:c" in names, "a recall would need it"
    assert not {"in:a", "in:b"} & names


def test_a_canary_that_nobody_confirmed_clears_nothing(queue: Queue) -> None:
    look(queue, "w1")
    committed(queue, "w1", "a")
    assert vote(queue, "w1", "x", 1) == "alone"
    look(queue, "w1")
    assert len(trail(queue, "w1")) == 1


def test_kept_inputs_have_a_bound(queue: Queue) -> None:
    look(queue, "w1", 0)
    committed(queue, "w1", "a")
    assert trail(queue, "w1") == ["a"]
    assert "in:a" not in queue.names()
    queue.submit("b")
    size = queue.client.strlen(f"{queue.prefix}in:b")
    look(queue, "w1", size)
    committed(queue, "w1", "c")
    committed(queue, "w1", "d")
    assert [len(entry.split()) for entry in trail(queue, "w1")] == [1, 2, 1]


def test_an_input_that_its_owner_keeps_stays(queue: Queue) -> None:
    vote(queue, "w2", "x")
    look(queue, "w1")
    committed(queue, "w1", "a", keep_input=True)
    assert vote(queue, "w1", "x", 1) == "clean"
    look(queue, "w1")
    assert trail(queue, "w1") == []
    assert "in:a" in queue.names()


@pytest.mark.slow
def test_the_list_has_a_bound_and_says_so(queue: Queue) -> None:
    look(queue, "w1")
    key = f"{queue.prefix}did:w1"
    queue.client.rpush(key, *(f"old{number}" for number in range(20_512)))
    committed(queue, "w1", "new")
    assert queue.client.llen(key) == 20_001
    assert queue.client.hget(f"{queue.prefix}audit:w1", "lost_to") == b"512"
    assert look(queue, "w1").position == 20_513
    vote(queue, "w2", "x")
    assert vote(queue, "w1", "x", 20_513) == "clean"
    rounds = 0
    while look(queue, "w1").has_more:
        rounds += 1
    assert rounds >= 20_000 // 256 - 1, "a call does not take long"
    assert queue.client.llen(key) == 0
    assert queue.client.hget(f"{queue.prefix}audit:w1", "lost_to") is None


@pytest.mark.slow
def test_ten_thousand_canaries_of_healthy_workers_raise_no_alarm(queue: Queue) -> None:
    chosen = random.Random(1)
    verdicts = [vote(queue, f"w{chosen.randrange(40)}", "x") for _ in range(10_000)]
    assert verdicts[0] == "alone"
    assert set(verdicts) == {"alone", "clean"}
    assert not any(name.startswith("accused") for name in queue.names())


def test_a_purged_job_is_on_no_list(queue: Queue) -> None:
    """Earlier canaries are not deleted early, and its input is not counted as kept."""
    look(queue, "w1")
    committed(queue, "w1", "a", "b", "c", tenant="t")
    held = int(queue.client.hget(f"{queue.prefix}audit:w1", "held") or 0)
    assert held > 0
    position = look(queue, "w1").position
    queue.run(purge.jobs(queue.name, "t", ["b"], by_force=False))
    assert [entry.split()[0] for entry in trail(queue, "w1")] == ["a", "c"]
    assert int(queue.client.hget(f"{queue.prefix}audit:w1", "held") or 0) == held * 2 // 3
    committed(queue, "w1", "d")
    assert look(queue, "w1").position == position + 1
