"""A breakdown of a job's time: the sums alone, and each cause in the queue alone, on both servers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.producer.wire.calls import account, registry, transitions
from pagemill.producer.wire.calls.account import BLOCKS, MEANINGS, JobAccount, Lifetime, Run, write_spent
from pagemill.producer.wire.calls.limits import QueueLimits, set_limits
from pagemill.producer.wire.calls.metering.quotas import Quota, set_quotas
from pagemill.producer.wire.calls.registry import WorkerInfo
from tests.producer.driving import DECODE, Queue

PAUSE_S = 0.06
"""The duration of a cause: longer than everything else in a test, or the cause is the only one."""

moments = st.integers(-1_000, 60_000)
outcomes = st.sampled_from(["retried", "released", "lost", "crashed", "succeeded", "failed", "running"])
numbers = st.dictionaries(st.sampled_from([*account.LETTERS, "c", "n"]), st.integers(1, 40_000)).map(
    write_spent
)
runs = st.builds(
    Run, moments, st.none() | moments, st.none() | moments, st.none() | moments, outcomes, numbers
)
spans = st.lists(st.tuples(moments, moments), max_size=5).map(tuple)
lifetimes = st.builds(
    Lifetime,
    created_at=moments,
    ended_at=moments,
    held=st.sampled_from(["dependency", "delay", "equal_job"]),
    runs=st.lists(runs, max_size=5).map(tuple),
    queued_at=st.none() | moments,
    is_held=st.booleans(),
    blocks=st.tuples(*(st.tuples(st.just(cause), spans) for cause in BLOCKS)),
)


@given(lifetimes)
def test_the_parts_are_positive_and_sum_to_the_lifetime_whatever_the_clocks_did(life: Lifetime) -> None:
    parts = account.account(life)
    assert sum(milliseconds for _, milliseconds in parts) == max(0, life.ended_at - life.created_at)
    assert all(milliseconds > 0 for _, milliseconds in parts)
    causes = [cause for cause, _ in parts]
    assert causes == [cause for cause in MEANINGS if cause in causes], "each once, in order"


def test_a_lifetime_of_known_parts() -> None:
    life = Lifetime(
        created_at=1_000,
        ended_at=31_000,
        held="dependency",
        queued_at=14_000,
        runs=(
            Run(5_000, 9_000, 2_000, None, "retried", write_spent({"o": 500, "p": 1_500})),
            Run(11_000, 14_000, 10_000, 12_000, "crashed"),
            Run(20_000, 31_000, 14_000, 30_000, "succeeded", write_spent({"p": 2_000, "d": 8_000, "n": 15})),
        ),
        blocks=(("paused", ((3_000, 4_000),)), ("no_worker", ((3_500, 4_500), (15_000, 17_000)))),
    )
    assert dict(account.account(life)) == {
        "dependency": 1_000, "paused": 1_000, "no_worker": 500 + 2_000, "behind": 500 + 1_000 + 1_000 + 4_000,
        "opening": 500, "prompt": 1_500, "commit": 2_000 + 1_000, "retry_pause": 1_000, "running": 1_000,
        "repeated": 2_000 + 2_000, "decode": 8_000,
    }  # fmt: skip


def test_what_a_worker_reports_in_excess_of_the_execution_is_cut() -> None:
    life = Lifetime(0, 100, "delay", (Run(10, 60, None, None, "failed", "p20d900"),))
    assert account.account(life) == [("behind", 50), ("prompt", 20), ("decode", 30)]


def announce(queue: Queue, worker: str = "w1", **fields: object) -> None:
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id=worker, models=("m",), **fields)))


def read(queue: Queue, job_id: str = "a") -> JobAccount:
    found = queue.run(account.why(queue.name, job_id))
    assert found is not None
    assert sum(round(part.seconds * 1000) for part in found.parts) == round(found.seconds * 1000)
    return found


def causes(queue: Queue, job_id: str = "a") -> dict[str, float]:
    return {part.cause: part.seconds for part in read(queue, job_id).parts}


def blamed(queue: Queue, job_id: str = "a") -> str:
    """The cause that lasted longest, at least for its minimum duration."""
    found = causes(queue, job_id)
    cause = max(found, key=lambda name: found[name])
    assert found[cause] >= PAUSE_S - 0.002, found
    return cause


def run_through(queue: Queue, job_id: str = "a", **options: object) -> None:
    (job,) = (job for job in queue.pull(**options) if job.job_id == job_id)
    queue.commit(job)


def test_an_unknown_job_has_no_account(queue: Queue) -> None:
    assert queue.run(account.why(queue.name, "nobody")) is None


def test_the_jobs_that_it_waited_behind_are_counted_by_tenant(queue: Queue) -> None:
    announce(queue)
    queue.submit("x1", "x2", "x3", tenant="big")
    queue.submit("y", tenant="urgent", priority="high")
    queue.submit("a")
    time.sleep(PAUSE_S)
    queue.pull()
    time.sleep(PAUSE_S)
    queue.submit("b", "c", tenant="big")
    time.sleep(PAUSE_S)
    assert set(causes(queue, "b")) == {"behind"}
    found = read(queue)
    assert {(each.tenant, each.priority): each.jobs for each in found.behind} == {
        ("big", "normal"): 3,
        ("urgent", "high"): 1,
    }
    seconds = {part.cause: part.seconds for part in found.parts}["behind"]
    assert sum(each.seconds for each in found.behind) == pytest.approx(seconds, abs=0.002)


STEP_S = 0.01


def starts_before(queue: Queue, job_id: str) -> int:
    """Run the queue's jobs one by one, each for the same time; return how many started before this one."""
    for count in range(1_000):
        job = queue.pull_one()
        time.sleep(STEP_S)
        queue.run(transitions.commit(queue.name, job.job_id, job.token, "succeeded", "{}"))
        if job.job_id == job_id:
            return count
    raise AssertionError("it never started")


@pytest.mark.slow
def test_without_the_blamed_tenant_it_starts_earlier_by_the_blamed_amount(queue: Queue) -> None:
    """In jobs of equal duration: the server's clock is independent of the test's."""
    announce(queue)

    def submit(name: str, *tenants: str, priority: str = "normal") -> str:
        for tenant in tenants:
            queue.submit(*(f"{name}-{tenant}-{i}" for i in range(20)), tenant=tenant)
        queue.submit(*(f"{name}-own-{i}" for i in range(10)), tenant="own")
        queue.submit(f"{name}-last", tenant="own", priority=priority)
        return f"{name}-last"

    job_id = submit("all", "big", "small")
    together = starts_before(queue, job_id)
    found = read(queue, job_id)
    (big,) = (each for each in found.behind if each.tenant == "big")
    wait = {part.cause: part.seconds for part in found.parts}["behind"]
    assert big.seconds == pytest.approx(wait * big.jobs / together, rel=0.1)
    while queue.pull():
        pass
    alone = starts_before(queue, submit("without", "small"))
    assert together - alone == pytest.approx(big.jobs, rel=0.1)
    earlier = {each.change: each.seconds for each in found.earlier}
    assert earlier["one more worker"] == pytest.approx(wait / 2, abs=0.002)
    while queue.pull():
        pass
    at_once = starts_before(queue, submit("high", "big", "small", priority="high"))
    assert (together - at_once) / together == pytest.approx(earlier["priority high"] / wait, rel=0.1)


def test_a_pause_is_named_while_it_lasts_and_after(queue: Queue) -> None:
    announce(queue)
    queue.run(registry.set_paused(queue.name, True))
    queue.submit("a")
    time.sleep(PAUSE_S)
    assert set(causes(queue)) == {"paused"}
    queue.run(registry.set_paused(queue.name, False))
    run_through(queue)
    assert blamed(queue) == "paused"


def test_a_model_that_no_worker_serves_is_named(queue: Queue) -> None:
    queue.submit("a")
    time.sleep(PAUSE_S)
    assert set(causes(queue)) == {"no_worker"}
    announce(queue)
    run_through(queue)
    assert blamed(queue) == "no_worker"
    queue.run(registry.unregister(queue.name, "w1"))
    queue.submit("b")
    time.sleep(PAUSE_S)
    assert blamed(queue, "b") == "no_worker"


def test_a_worker_that_fell_silent_is_gone_since_its_last_heartbeat(queue: Queue) -> None:
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w1", models=("m",)), ttl_ms=20))
    queue.submit("a")
    time.sleep(PAUSE_S)
    announce(queue, "w2")
    run_through(queue)
    assert blamed(queue) == "no_worker"


def test_a_capability_that_no_worker_has_is_named(queue: Queue) -> None:
    announce(queue, knows="1")
    queue.submit("p")
    queue.submit("a", after=["p"])
    run_through(queue, "p")
    time.sleep(PAUSE_S)
    assert blamed(queue) == "no_capability"
    announce(queue, "w2", knows="1+after")
    run_through(queue)
    assert blamed(queue) == "no_capability"


def test_a_quota_is_named(queue: Queue) -> None:
    announce(queue)
    queue.run(set_quotas(queue.name, {"t": Quota(running=1)}))
    queue.submit("x", "a", tenant="t")
    (first,) = queue.pull()
    time.sleep(PAUSE_S)
    assert blamed(queue) == "quota"
    queue.commit(first)
    run_through(queue)
    assert blamed(queue) == "quota"


def test_the_rate_limit_is_named(queue: Queue) -> None:
    announce(queue)
    queue.run(set_limits(queue.name, QueueLimits(rate=10.0, burst=1)))
    queue.submit("x", "a")
    queue.pull()
    assert queue.pull() == []
    time.sleep(0.12)
    run_through(queue)
    assert blamed(queue) == "rate_limit"


def test_a_dependency_a_delay_and_an_equal_job_are_named(queue: Queue) -> None:
    announce(queue, knows="1+after")
    queue.submit("p")
    queue.submit("a", after=["p"])
    queue.submit("d", delay=600)
    time.sleep(PAUSE_S)
    assert set(causes(queue)) == {"dependency"}
    assert set(causes(queue, "d")) == {"delay"}
    run_through(queue, "p")
    run_through(queue)
    queue.cancel("d")
    assert blamed(queue) == "dependency"
    assert set(causes(queue, "d")) == {"delay"}
    queue.submit("e", "f", dedupe=True, temperature=0)
    time.sleep(PAUSE_S)
    run_through(queue, "e")
    assert set(causes(queue, "f")) == {"equal_job"}


def test_a_pause_before_another_attempt_is_named(queue: Queue) -> None:
    announce(queue)
    queue.submit("a")
    queue.retry(queue.pull_one(), PAUSE_S)
    time.sleep(PAUSE_S + 0.01)
    run_through(queue)
    assert blamed(queue) == "retry_pause"


def test_what_a_lost_worker_had_not_saved_counts_as_repeated(queue: Queue) -> None:
    announce(queue)
    queue.submit("a")
    job = queue.pull_one()
    time.sleep(PAUSE_S)
    queue.checkpoint(job, progress=DECODE)
    time.sleep(2 * PAUSE_S)
    queue.lapse("a")
    run_through(queue)
    found = causes(queue)
    assert found["running"] >= PAUSE_S - 0.002
    assert found["repeated"] >= 2 * PAUSE_S - 0.002


def test_a_worker_reports_where_its_time_went(queue: Queue) -> None:
    announce(queue)
    queue.submit("a", "b", "c")
    first, second, third = queue.pull()
    time.sleep(PAUSE_S)
    queue.commit(first, spent="p20d10n25c3")
    queue.run(transitions.release(queue.name, "b", second.token, spent="s40"))
    queue.retry(third, spent="k30")
    found = read(queue)
    assert {part.cause: part.seconds for part in found.parts}.items() >= {
        "prompt": 0.02,
        "decode": 0.01,
    }.items()
    assert (found.cached_tokens, found.decoded_beside) == (3, 2.5)
    assert causes(queue, "b")["sequence_slot"] == 0.04
    assert causes(queue, "c")["kv_block"] == 0.03


def test_a_record_grows_by_less_than_150_bytes(queue: Queue) -> None:
    queue.submit("a", "b")
    first, second = queue.pull()
    longest = write_spent(dict.fromkeys(account.LETTERS, 123_456) | {"n": 999, "c": 99_999})
    assert len(longest) > 55
    queue.commit(first, spent=longest, progress=DECODE)
    queue.commit(second, progress=DECODE)
    assert queue.client.hget(f"{queue.prefix}job:a", "spent") == longest.encode()
    with_times, without = (queue.client.memory_usage(f"{queue.prefix}job:{name}", samples=0) for name in "ab")
    assert with_times - without <= 150


def test_what_the_queue_notes_is_bounded(queue: Queue) -> None:
    for _ in range(70):
        queue.run(registry.set_paused(queue.name, True))
        queue.run(registry.set_paused(queue.name, False))
        newest = queue.client.lindex(f"{queue.prefix}spells:paused", 0).split()
        queue.client.lset(f"{queue.prefix}spells:paused", 0, f"1 {int(newest[1]) - 5_000}")  # not joined
    assert queue.client.llen(f"{queue.prefix}spells:paused") == 64
    for number in range(40):
        announce(queue, f"w{number}", knows=f"1+word{number}")
    assert queue.client.hlen(f"{queue.prefix}alive:m") == 32
    for name in ("spells:paused", "spells:1+word0:m", "alive:m"):
        assert queue.client.pttl(f"{queue.prefix}{name}") > 0
