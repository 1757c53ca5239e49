"""The order of jobs: weights, aging, prefix affinity, the parent's worker, and no starvation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pagemill.producer.wire.calls import limits, registry, submissions, transitions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.affinity import prompt_affinity
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.needs import joined
from tests.producer.driving import Queue
from tests.producer.queue_sets import check_indexes

LONG = "template " * 40
REACH = 8192
"""From choosing.lua: a job is not overtaken by a job that was submitted further behind."""


def set_weights(queue: Queue, **weights: int) -> dict[str, int]:
    return queue.run(limits.set_weights(queue.name, weights))


def tenants(queue: Queue, count: int) -> list[str]:
    """The tenants of pulled jobs; the first letter of an id is its tenant."""
    return [job.job_id[0] for job in queue.pull(count)]


def lane_of(queue: Queue) -> list[str]:
    """The entries of the one lane that these tests use."""
    return [entry.decode() for entry in queue.client.zrange(f"{queue.prefix}wait:1:1:default:m", 0, -1)]


def test_tenants_have_turns_by_weight(queue: Queue) -> None:
    assert set_weights(queue, a=3) == {"a": 3}
    for tenant in "ab":
        queue.submit(*(f"{tenant}{i}" for i in range(40)), tenant=tenant)
    assert Counter(tenants(queue, 40)) == {"a": 30, "b": 10}
    assert set_weights(queue, a=1) == {}
    assert Counter(tenants(queue, 20)) == {"a": 10, "b": 10}


def test_weights_hold_across_pulls_and_for_who_submits_one_by_one(queue: Queue) -> None:
    set_weights(queue, a=2)
    queue.submit(*(f"a{i}" for i in range(60)), tenant="a")
    pulled = []
    for i in range(45):
        # b always has exactly one waiting job: it must neither be first each time nor wait for all of a's jobs.
        if not pulled or pulled[-1] == "b":
            queue.submit(f"b{i}", tenant="b")
        pulled += tenants(queue, 1)
    assert Counter(pulled) == {"a": 30, "b": 15}


def test_a_tenant_who_comes_late_is_level_with_the_others(queue: Queue) -> None:
    queue.submit(*(f"a{i}" for i in range(30)), tenant="a")
    tenants(queue, 20)
    queue.submit(*(f"b{i}" for i in range(10)), tenant="b")
    assert Counter(tenants(queue, 10)) == {"a": 5, "b": 5}


@pytest.mark.parametrize("weight", [0, -1, 1001])
def test_a_weight_that_makes_no_sense_is_refused(valkey_queue: Queue, weight: int) -> None:
    with pytest.raises(InvalidJob):
        set_weights(valkey_queue, a=weight)
    with pytest.raises(InvalidJob):
        valkey_queue.run(limits.set_weights(valkey_queue.name, {"no tenant": 1}))


def test_models_take_turns_on_a_worker_that_serves_several(queue: Queue) -> None:
    for model in ("m", "n"):
        queue.submit(*(f"{model}{i}" for i in range(10)), model=model)
    pulled = [job.job_id[0] for job in queue.pull(10, models=("m", "n"))]
    assert Counter(pulled) == {"m": 5, "n": 5}
    assert {job.job_id[0] for job in queue.pull(10, models=("n",))} == {"n"}


def test_the_turns_of_a_model_without_jobs_go_to_all_others(queue: Queue) -> None:
    for model in ("m", "n"):
        queue.submit(*(f"{model}{i}" for i in range(10)), model=model)
    pulled = [job.job_id[0] for job in queue.pull(10, models=("m", "idle", "n", "empty"))]
    assert Counter(pulled) == {"m": 5, "n": 5}


def test_needs_take_turns_and_change_nothing_of_the_models_turns(queue: Queue) -> None:
    for model in ("m", "n"):
        queue.submit(*(f"{model}-plain-{i}" for i in range(10)), model=model)
    lane = keys.lane(joined("after"), "normal", "default", "n")
    headers = (f'{{"id":"n-after-{i}","lane":"{lane}","cost":1}}'.encode() for i in range(10))
    items = [Submission(f"n-after-{i}", header, b"{}") for i, header in enumerate(headers)]
    queue.run(submissions.submit(queue.name, items))
    pulled = Counter(job.job_id.rpartition("-")[0] for job in queue.pull(16, models=("m", "n")))
    assert pulled == {"m-plain": 8, "n-plain": 4, "n-after": 4}


def test_all_tasks_of_a_tenant_come_in_the_order_of_their_submits(queue: Queue) -> None:
    for i in range(4):
        queue.submit(f"generate{i}")
        queue.submit(f"score{i}", task="score")
        queue.submit(f"label{i}", label_probs="mean", structured_outputs={"choice": ["a", "b"]})
    names = [f"{kind}{i}" for i in range(4) for kind in ("generate", "score", "label")]
    assert [job.job_id for job in queue.pull(12)] == names


def test_a_worker_that_serves_fewer_models_takes_no_turns_from_another(queue: Queue) -> None:
    for model in ("m", "n"):
        queue.submit(*(f"{model}{i}" for i in range(40)), model=model)
    pulled = Counter[str]()
    for _ in range(16):
        (job,) = queue.pull(1, worker="both", models=("m", "n"))
        pulled[job.job_id[0]] += 1
        assert queue.pull_one(worker="one").job_id[0] == "m"
    assert pulled == {"m": 8, "n": 8}


def test_every_worker_gives_an_eighth_to_who_waits_longest(queue: Queue) -> None:
    queue.submit(*(f"l{i}" for i in range(4)), priority="low")
    for i in range(4):
        queue.client.hset(f"{queue.prefix}job:l{i}", "at", 1)
    queue.submit(*(f"h{i}" for i in range(40)), priority="high")
    came = {worker: Counter[str]() for worker in ("w1", "w2")}
    for _ in range(16):
        for worker, counter in came.items():
            counter[queue.pull_one(worker=worker).job_id[0]] += 1
    assert came == {"w1": {"h": 14, "l": 2}, "w2": {"h": 14, "l": 2}}


def test_workers_that_pull_once_and_leave_take_turns_as_one(queue: Queue) -> None:
    for model in ("m", "n"):
        queue.submit(*(f"{model}{i}" for i in range(10)), model=model)
    pulled = [queue.pull_one(worker=f"w{i}", models=("m", "n")).job_id[0] for i in range(10)]
    assert Counter(pulled) == {"m": 5, "n": 5}


def test_nothing_starves_under_a_flood_of_urgent_jobs(queue: Queue) -> None:
    for tenant in "xyz":
        queue.submit(f"low-{tenant}", priority="low", tenant=tenant)
        queue.submit(f"normal-{tenant}", priority="normal", tenant=tenant)
        for name in (f"low-{tenant}", f"normal-{tenant}"):
            queue.client.hset(f"{queue.prefix}job:{name}", "at", 1)
    rounds, waiting = 0, 6
    while waiting:
        rounds += 1
        assert rounds <= 8, "six old jobs take six turns of eight"
        queue.submit(*(f"h{rounds}-{i}" for i in range(8)), priority="high")
        waiting -= sum(not job.job_id.startswith("h") for job in queue.pull(8))


def test_jobs_with_a_common_prefix_come_together(queue: Queue) -> None:
    for i in range(6):
        for letter in "abc":
            queue.submit(f"{letter}{i}", prompt=f"{letter} {LONG} row {i}")
    assert "".join(job.job_id[0] for job in queue.pull(18)) == "a" * 6 + "b" * 6 + "c" * 6


def test_a_worker_goes_on_with_the_prefix_it_has(queue: Queue) -> None:
    for i in range(4):
        for letter in "ab":
            queue.submit(
                f"{letter}{i}",
                prompt=None,
                messages=[{"role": "system", "content": letter}, {"role": "user", "content": str(i)}],
            )
    assert [job.job_id for job in queue.pull(1, worker="w1")] == ["a0"]
    (affinity,) = (entry.removeprefix("b0 ") for entry in lane_of(queue) if entry.startswith("b0 "))
    queue.client.hset(f"{queue.prefix}puller:w2", "1:1:default:m", affinity)
    assert [job.job_id for job in queue.pull(2, worker="w2")] == ["b0", "b1"]
    assert [job.job_id for job in queue.pull(2, worker="w1")] == ["a1", "a2"]
    assert [job.job_id for job in queue.pull(3, worker="w1")] == ["a3", "b2", "b3"]
    assert "overtaken" not in queue.names()


def test_a_job_keeps_its_affinity_on_every_way_back_to_its_lane(queue: Queue) -> None:
    """While it waits, only its lane refers to it."""
    entry = f"a {prompt_affinity(LONG)}"
    queue.submit("a", prompt=LONG)
    assert lane_of(queue) == [entry]
    queue.release(queue.pull_one())
    assert lane_of(queue) == [entry]
    queue.pull_one()
    queue.lapse("a")
    queue.run(transitions.sweep(queue.name))
    assert lane_of(queue) == [entry]
    queue.retry(queue.pull_one(), 60)
    assert lane_of(queue) == []
    queue.make_due("a")
    queue.run(transitions.sweep(queue.name))
    assert lane_of(queue) == [entry]


def test_delayed_jobs_and_followers_come_to_their_lane_with_their_affinity(queue: Queue) -> None:
    affinity = prompt_affinity(LONG)
    queue.submit("later", prompt=LONG, delay=3600)
    queue.submit("lead", "follow", prompt=LONG, dedupe=True, temperature=0.0)
    queue.make_due("later")
    queue.run(transitions.sweep(queue.name))
    assert lane_of(queue) == [f"later {affinity}", f"lead {affinity}"]
    queue.cancel("lead")
    assert lane_of(queue) == [f"later {affinity}", f"follow {affinity}"]


def test_who_leaves_the_lane_takes_nobody_along(queue: Queue) -> None:
    queue.submit("a", "b", "c", prompt=LONG)
    assert [queue.status(name).position for name in "abc"] == [0, 1, 2]
    queue.cancel("b")
    assert [queue.status(name).position for name in "abc"] == [0, None, 1]
    assert [entry[0] for entry in lane_of(queue)] == ["a", "c"]


def test_the_oldest_is_overtaken_64_times_at_most(queue: Queue) -> None:
    queue.submit("warm-up", prompt=f"a {LONG}")
    queue.pull_one()
    queue.submit("patient", prompt=f"b {LONG}")
    for i in range(100):
        queue.submit(f"a{i}", prompt=f"a {LONG} {i}")
    # In small pulls, like those of a busy worker: the count is kept between them.
    pulled = [job.job_id for _ in range(17) for job in queue.pull(4)]
    assert pulled.index("patient") == 64


def test_affinity_looks_as_far_as_the_reach(queue: Queue) -> None:
    queue.submit("warm-up", prompt=f"a {LONG}")
    queue.pull_one()
    queue.submit("b0", "b1", prompt=f"b {LONG}")
    first = int(queue.client.hget(f"{queue.prefix}meta", "seq") or 0) - 1
    for name, rank in (("near", first + REACH), ("far", first + REACH + 1)):
        queue.client.hset(f"{queue.prefix}meta", "seq", rank - 1)
        queue.submit(name, prompt=f"a {LONG}")
    assert [job.job_id for job in queue.pull(2)] == ["near", "b0"], (
        "the one by whom b0 may not be overtaken waits"
    )
    check_indexes(queue, queue.names())


def test_a_prefix_is_found_behind_thousands_of_others(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit("warm-up", prompt=f"a {LONG}")
    queue.pull_one()
    for i in range(30):
        queue.submit(*(f"b{i}-{j}" for j in range(200)), prompt=f"b{i} {LONG}")
    queue.submit("far", prompt=f"a {LONG}")
    pulled = []
    while "far" not in pulled:
        assert len(pulled) < 7, "a pull looks at 1,024 more jobs, and the next goes on from there"
        queue.client.hset(f"{queue.prefix}puller:w1", "1:1:default:m", str(prompt_affinity(f"a {LONG}")))
        pulled.append(queue.pull_one().job_id)
    assert pulled[0] == "b0-0"
    check_indexes(queue, queue.names())


def test_workers_keep_to_prefixes_of_their_own(queue: Queue) -> None:
    for i in range(12):
        for letter in "abc":
            queue.submit(f"{letter}{i}", prompt=f"{letter} {LONG} {i}")
    # A worker's last prefix in another tenant's lane does not count as an affinity here.
    queue.submit(*(f"d{i}" for i in range(4)), tenant="other", prompt=f"d {LONG}")
    came: dict[str, list[str]] = {"w1": [], "w2": []}
    for _ in range(10):
        for worker, letters in came.items():
            letters.append(queue.pull_one(worker=worker).job_id[0])
    own = {worker: set(letters) - {"d"} for worker, letters in came.items()}
    assert own["w1"] == {"a"}
    assert own["w2"] == {"b"}


def test_index_entries_of_jobs_that_left_unseen_do_no_harm(queue: Queue) -> None:
    queue.submit("warm-up", prompt=f"a {LONG}")
    queue.pull_one()
    queue.submit("b", prompt=f"b {LONG}")
    queue.submit(*(f"a{i}" for i in range(6)), prompt=f"a {LONG}")
    assert queue.pull_one().job_id == "a0"
    affinity = prompt_affinity(f"a {LONG}")
    for entry in (f"b {prompt_affinity(f'b {LONG}')}", f"a1 {affinity}", f"a2 {affinity}"):
        queue.client.zrem(f"{queue.prefix}wait:1:1:default:m", entry)
    queue.client.zrem(f"{queue.prefix}wait:1:1:default:m", f"a3 {affinity}")
    queue.client.zadd(f"{queue.prefix}wait:1:s:default:m", {f"a3 {affinity}": 99})
    assert [job.job_id for job in queue.pull(9)] == ["a4", "a5"]
    assert not any(name.startswith("alike:") for name in queue.names())


def test_what_a_worker_wants_of_many_lanes_is_forgotten_in_time(queue: Queue) -> None:
    record = f"{queue.prefix}puller:w1"
    queue.submit("a", prompt=LONG)
    queue.pull_one()
    assert queue.client.hkeys(record) == [b"turn", b"cursor", b"1:1:default:m", b"changes"]
    queue.client.hset(record, "changes", 1000)
    queue.submit("b", tenant="other", prompt=LONG)
    queue.pull_one()
    assert set(queue.client.hkeys(record)) == {b"turn", b"cursor", b"1:1:other:m", b"changes"}
    assert queue.client.hget(record, "turn") == b"2"
    assert queue.client.pttl(record) > 0


def test_jobs_that_came_back_unseen_wait_for_their_turn(queue: Queue) -> None:
    queue.submit("warm-up", prompt=f"a {LONG}")
    queue.pull_one()
    queue.submit("b0", "b1", prompt=f"b {LONG}")
    queue.submit("a0", "a1", prompt=f"a {LONG}")
    assert queue.pull_one().job_id == "a0"
    entry = f"a1 {prompt_affinity(f'a {LONG}')}"
    (place,) = (
        place
        for place in queue.client.zrange(f"{queue.prefix}alike:1:1:default:m", 0, -1)
        if place.endswith(
            str(int(queue.client.zscore(f"{queue.prefix}wait:1:1:default:m", entry) or 0)).encode()
        )
        and not place.startswith(b"!")
    )
    queue.client.zrem(f"{queue.prefix}alike:1:1:default:m", place)
    assert [job.job_id for job in queue.pull(9)] == ["b0", "b1", "a1"]


def test_the_turn_of_the_longest_waiting_is_its_own(queue: Queue) -> None:
    """The age limit has precedence over affinity."""
    queue.submit("warm-up", prompt=f"a {LONG}")
    queue.pull_one()
    queue.submit("old", prompt=f"b {LONG}")
    queue.client.hset(f"{queue.prefix}job:old", "at", 1)
    queue.submit(*(f"a{i}" for i in range(30)), prompt=f"a {LONG}")
    assert [job.job_id for job in queue.pull(30)].index("old") <= 7


def test_a_rate_lets_so_many_start(queue: Queue) -> None:
    queue.run(limits.set_limits(queue.name, limits.QueueLimits(rate=0.001, burst=3)))
    queue.submit(*(f"j{i}" for i in range(5)))
    assert len(queue.pull(2)) == 2
    assert len(queue.pull(5)) == 1
    reply = queue.run(transitions.pull(queue.name, "w", ["m"], 5, 1000))
    assert (reply.jobs, reply.queued) == ([], 2)
    assert reply.limited_ms is not None
    assert 900_000 < reply.limited_ms <= 1_000_000
    # A thousand seconds later the next one may start, and only that one.
    queue.client.hincrby(f"{queue.prefix}meta", "level_at", -1_000_000)
    assert len(queue.pull(5)) == 1
    queue.run(limits.set_limits(queue.name, limits.QueueLimits()))
    assert len(queue.pull(5)) == 1


def test_limits_are_read_back_and_taken_away(queue: Queue) -> None:
    wanted = limits.QueueLimits(jobs=5, payload_bytes=2000, rate=2.5)
    assert queue.run(limits.set_limits(queue.name, wanted)) == limits.QueueLimits(5, 2000, 2.5, burst=2)
    assert queue.run(limits.limits(queue.name)).rate == 2.5
    assert queue.submit(*(f"j{i}" for i in range(6)))[-1] == "full"
    assert queue.submit("big", prompt="x" * 3000) == ["too_large"]
    assert queue.run(limits.set_limits(queue.name, limits.QueueLimits())) == limits.QueueLimits()
    assert queue.submit("big", prompt="x" * 3000) == ["created"]
    with pytest.raises(InvalidJob):
        limits.set_limits(queue.name, limits.QueueLimits(jobs=-1))


def test_workers_are_forgotten_once_no_lease_of_theirs_can_be_left(queue: Queue) -> None:
    for name in ("idle", "busy"):
        queue.run(registry.heartbeat(queue.name, registry.WorkerInfo(id=name, models=("m",))))
    queue.submit("a")
    queue.pull_one(worker="busy")
    silent_since = int(queue.client.time()[0] * 1000) - 10_000
    queue.client.zadd(f"{queue.prefix}workers", {"idle": 1, "busy": silent_since}, xx=True)
    queue.run(transitions.sweep(queue.name))
    assert queue.client.zrange(f"{queue.prefix}workers", 0, -1) == [b"busy"], "it may hold a lease still"
    queue.client.zadd(f"{queue.prefix}workers", {"busy": 1}, xx=True)
    queue.run(transitions.sweep(queue.name))
    assert "workers" not in queue.names()


def test_queues_of_one_server_are_apart(queue: Queue) -> None:
    other = Queue(f"{queue.name}-other", queue.url, queue.transport)
    queue.submit("a")
    other.submit("a")
    other.run(registry.set_paused(other.name, True))
    assert other.pull() == []
    assert [job.job_id for job in queue.pull()] == ["a"]
    assert other.state("a") == "queued"


def test_a_job_behind_many_idle_tenants_is_found_in_several_short_calls(valkey_queue: Queue) -> None:
    queue = valkey_queue
    turns = {f"t{number}": number for number in range(5000)}
    queue.submit("one", tenant="last")
    queue.client.zadd(f"{queue.prefix}turns:1:1:m", turns)
    queue.client.zadd(f"{queue.prefix}turns:1:1:m", {"last": 5000})
    calls = 1
    while not queue.pull(1):
        assert queue.client.exists(f"{queue.prefix}bell:m"), "an idle worker looks again at once"
        calls += 1
    assert 1 < calls <= 6


@pytest.mark.slow
def test_statistics_of_many_lanes_come_in_pages(valkey_queue: Queue) -> None:
    queue = valkey_queue
    for number in range(3000):
        queue.submit(f"j{number}", tenant=f"t{number}")
    page = queue.run(registry.stats_page(queue.name))
    assert 1000 <= len(page.lanes) < 2000
    stats = registry.stats(queue.run, queue.name)
    assert stats.waiting == {("normal", f"t{number}", "m"): 1 for number in range(3000)}


def test_resuming_wakes_who_waits_for_any_model(queue: Queue) -> None:
    queue.run(registry.heartbeat(queue.name, registry.WorkerInfo(id="w", models=("m", "n"))))
    queue.run(registry.set_paused(queue.name, True))
    queue.run(registry.set_paused(queue.name, False))
    assert {"bell:m", "bell:n"} <= queue.names()


def test_a_worker_takes_first_what_waited_for_its_own_jobs(queue: Queue) -> None:
    for name in "abcdef":
        queue.submit(name, prompt="p" * 300 + name)
        queue.submit(f"of-{name}", prompt="p" * 300 + name + " and on", after=[name])
    for job in queue.pull(3, worker="w1") + queue.pull(3, worker="w2"):
        queue.commit(job)
    assert [job.job_id for job in queue.pull(2, worker="w2")] == ["of-d", "of-e"]
    assert [job.job_id for job in queue.pull(2, worker="w1")] == ["of-a", "of-b"]
    # Jobs do not wait for the best worker.
    assert [job.job_id for job in queue.pull(3, worker="w2")] == ["of-f", "of-c"]
    assert queue.client.hget(f"{queue.prefix}warm", "w2") == queue.client.hget(f"{queue.prefix}warm", "w1")


def test_what_begins_otherwise_goes_to_anybody(queue: Queue) -> None:
    for name in "ab":
        queue.submit(name, prompt="p" * 300 + name)
        queue.submit(f"of-{name}", prompt="q" * 300 + name, after=[name])
    for job in queue.pull(1, worker="a") + queue.pull(1, worker="b"):
        queue.commit(job)
    assert [job.job_id for job in queue.pull(1, worker="b")] == ["of-a"]


def with_a_released_job(queue: Queue, **fields: Any) -> None:
    """A job whose parent ran at worker "home", and others without parents."""
    queue.submit("p", **fields)
    queue.submit("of-p", after=["p"], **fields)
    queue.commit(queue.pull_one(worker="home"))
    queue.submit(*(f"j{number}" for number in range(80)))


def test_another_worker_leaves_a_released_job_to_its_own(queue: Queue) -> None:
    with_a_released_job(queue)
    taken = [queue.pull_one(worker="other").job_id for _ in range(10)]
    assert taken == [f"j{number}" for number in range(10)]
    assert "of-p" in [queue.pull_one(worker="home").job_id for _ in range(2)]


def test_it_does_64_times_at_most(queue: Queue) -> None:
    with_a_released_job(queue)
    taken = [queue.pull_one(worker="other").job_id for _ in range(81)]
    # The lanes of the two versions alternate, and the released job is skipped at its own.
    assert 64 <= taken.index("of-p") <= 80


def test_nothing_less_urgent_is_taken_instead(queue: Queue) -> None:
    with_a_released_job(queue, priority="high")
    assert queue.pull_one(worker="other").job_id == "of-p"


def test_the_oldest_is_overtaken_64_times_by_those_whose_parents_ran_here(queue: Queue) -> None:
    names = ["first", *(f"j{number}" for number in range(70))]
    for name in names:
        queue.submit(name)
        queue.submit(f"of-{name}", after=[name])
    for job in queue.pull(1, worker="other") + queue.pull(70, worker="w1"):
        queue.commit(job)
    for _ in range(3):
        queue.run(transitions.sweep(queue.name))
    taken = [job.job_id for _ in range(71) for job in queue.pull(1, worker="w1")]
    assert taken == [
        *(f"of-j{number}" for number in range(64)),
        "of-first",
        *(f"of-j{n}" for n in range(64, 70)),
    ]


@pytest.mark.parametrize("lost", ["needs:m", "turns:1:1:m"])
def test_a_lane_whose_entry_was_lost_is_found_after_the_next_submit(queue: Queue, lost: str) -> None:
    queue.submit("a1", tenant="a")
    assert queue.client.delete(queue.prefix + lost) == 1
    assert queue.pull() == []
    queue.submit("a2", tenant="a")
    assert [job.job_id for job in queue.pull()] == ["a1", "a2"]


def test_a_lane_that_a_pull_opens_wakes_the_next_one(queue: Queue) -> None:
    """The first duplicate of a lost job waits in another class."""
    equal = {"dedupe": True, "temperature": 0.0}
    queue.submit("lead", priority="high", **equal)
    queue.submit("follow", **equal)
    queue.client.delete(f"{queue.prefix}in:lead")
    assert queue.pull() == []
    assert queue.client.llen(f"{queue.prefix}bell:m") > 0
    assert queue.pull_one().job_id == "follow"
    assert queue.pull() == []
    assert queue.client.llen(f"{queue.prefix}bell:m") == 0
