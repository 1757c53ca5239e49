"""Equal jobs share one stored end: it costs one copy and many small scripts, and lives as long as a sharer."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.calls import batches, dead_letters, reads, transitions
from pagemill.producer.wire.schema.outputs import Result
from tests.producer.driving import Queue, error_json, result_json
from tests.producer.wire.calls.test_dedupe import GREEDY

MEGABYTE = 1 << 20


def ends(queue: Queue) -> set[str]:
    """The stored ends, next to the jobs' records."""
    return {name for name in queue.names() if name.split(":")[0] in ("out", "end", "sharers", "settling")}


def commands(queue: Queue) -> int:
    """Redis commands run so far, including those inside scripts."""
    return sum(row["calls"] for row in queue.client.info("commandstats").values())


def test_a_large_result_is_stored_once_for_all_that_share_it(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit("lead", **GREEDY)
    queue.submit(*(f"f{i}" for i in range(256)), batch_id="b", **GREEDY)
    (job,) = queue.pull()
    before, calls = queue.client.info("memory")["used_memory"], commands(queue)
    body = result_json("lead", "x" * 4 * MEGABYTE)
    assert queue.run(transitions.commit(queue.name, "lead", job.token, "succeeded", body)) == "committed"
    assert commands(queue) - calls < 4000, "a script ends some of them, sweeps the others"
    queue.sweep(4)
    # Two copies, and the scripts that this run was the first to load.
    assert queue.client.info("memory")["used_memory"] - before < 2.1 * len(body)
    counts = queue.counts("b")
    assert counts.succeeded == 256
    last = queue.result("f255")
    assert (last.id, len(last.text), last.copied_from) == ("f255", 4 * MEGABYTE, "lead")


@pytest.mark.parametrize("order", ["e", "s"])
def test_an_end_lives_as_long_as_one_who_shares_it(queue: Queue, order: str) -> None:
    queue.submit("lead", "loose", **GREEDY)
    queue.submit("f1", "f2", batch_id="b", **GREEDY)
    queue.submit("f3", batch_id="c", **GREEDY)
    queue.commit(queue.pull_one(), "text")
    assert queue.run(batches.ack(queue.name, "b", f"{order}2", 0)) == (2, 2)
    assert queue.result("f3").text == queue.result("loose").text == "text"
    assert queue.run(batches.ack(queue.name, "b", f"{order}2", 0))[0] == 0, "the same call again"
    assert queue.run(batches.ack(queue.name, "c", f"{order}1", 0)) == (1, 1)
    assert queue.result("lead").text == "text", "jobs of no batch have theirs for a day"
    (end,) = (name for name in ends(queue))
    assert 86_300_000 < queue.client.pttl(f"{queue.prefix}{end}") <= 86_400_000


def test_nothing_is_left_of_an_end_that_everybody_let_go_of(queue: Queue) -> None:
    queue.submit("lead", "f1", "f2", batch_id="b", **GREEDY)
    queue.commit(queue.pull_one())
    assert len(ends(queue)) == 2
    assert queue.run(batches.ack(queue.name, "b", "e2", 0)) == (2, 2)
    assert queue.result("f2").text == "ok"
    assert queue.run(batches.ack(queue.name, "b", "e3", 0)) == (1, 3)
    assert ends(queue) == set()


def test_a_follower_that_was_cancelled_before_it_was_settled_holds_nothing(valkey_queue: Queue) -> None:
    queue = valkey_queue
    names = [f"f{i}" for i in range(200)]
    queue.submit("lead", *names, batch_id="b", **GREEDY)
    queue.commit(queue.pull_one())
    waiting = [name for name in names if queue.state(name) == "queued"]
    assert waiting, "more than one script settles"
    assert queue.status(waiting[0]).error is None
    assert queue.cancel(waiting[0]) == "cancelled"
    queue.sweep(4)
    assert {queue.state(name) for name in waiting[1:]} == {"succeeded"}
    queue.run(batches.ack(queue.name, "b", "e250", 0))
    assert ends(queue) == set()


def test_a_dead_leader_and_its_followers_are_letters_with_one_error(queue: Queue) -> None:
    queue.submit("lead", "follow", max_attempts=1, **GREEDY)
    assert queue.retry(queue.pull_one()) == "dead"
    letters = queue.run(dead_letters.open_letters(queue.name, ["lead", "follow"]))
    assert [letter.letter.code for letter in letters if letter] == ["attempts_exhausted"] * 2
    assert queue.status("follow").error == queue.status("lead").error != ""
    assert queue.run(dead_letters.purge(queue.name, ["lead"])) == 1
    assert queue.error("follow")


def test_a_followers_stream_ends_with_its_own_result(queue: Queue) -> None:
    queue.submit("lead", "follow", stream=True, **GREEDY)
    queue.commit(queue.pull_one(), "text")
    result = queue.run(reads.feed(queue.name, "follow", 0, 0)).result
    assert isinstance(result, Result)
    assert (result.id, result.copied_from, result.text) == ("follow", "lead", "text")


def test_an_end_copied_by_an_earlier_release_reads(queue: Queue) -> None:
    """Before ends were shared, a duplicate had a copy that began with its own id."""
    queue.submit("old")
    queue.commit(queue.pull_one(), "text")
    queue.client.hset(f"{queue.prefix}job:old", "leader", "gone")
    result = queue.result("old")
    assert (result.id, result.text) == ("old", "text")


def test_followers_of_many_leaders_that_expire_together_take_many_sweeps(valkey_queue: Queue) -> None:
    """No single script ends, or promotes, all of them."""
    queue = valkey_queue
    for leader in range(20):
        fields = GREEDY | {"prompt": f"p{leader}"}
        queue.submit(f"lead{leader}", ttl=3600.0, **fields)
        queue.submit(*(f"f{leader}.{i}" for i in range(100)), **fields)
        queue.client.zadd(f"{queue.prefix}deadlines", {f"lead{leader}": 1})
        queue.client.hset(f"{queue.prefix}job:lead{leader}", "deadline", 1)
    longest, sweeps = 0, 0
    while queue.client.zcard(f"{queue.prefix}deadlines"):
        before = commands(queue)
        queue.sweep()
        longest, sweeps = max(longest, commands(queue) - before), sweeps + 1
    assert sweeps > 1
    assert longest < 5000
    assert {queue.state(f"lead{leader}") for leader in range(20)} == {"expired"}


def test_a_failure_is_not_shared(queue: Queue) -> None:
    queue.submit("lead", "follow", **GREEDY)
    job = queue.pull_one()
    call = transitions.commit(queue.name, "lead", job.token, "failed", error_json=error_json())
    assert queue.run(call) == "committed"
    assert (queue.state("lead"), queue.state("follow")) == ("failed", "queued")
    assert ends(queue) == {"out:lead"}
