"""The ledger: the consumption of finished jobs, counted once."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.client.purge.report import PurgeOptions
from pagemill.producer.wire.calls import submissions, transitions
from pagemill.producer.wire.calls.metering import usage
from pagemill.producer.wire.calls.metering.usage import JobUsage, UsageFilter, UsageRow, UsageSums
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import DECODE, Queue, delta, error_json, result_json

USED = JobUsage(10, 4, 3, 0.25)


def rows(queue: Queue) -> list[UsageRow]:
    found = [
        row for day in queue.run(usage.days(queue.name)) for row in queue.run(usage.rows(queue.name, day))
    ]
    return sorted(found, key=lambda row: (row.day, row.tenant, row.model, row.api_key))


def sums(queue: Queue) -> tuple[int, int, int, int, float]:
    found = UsageSums(UsageFilter(by=()))
    found.add(rows(queue))
    every = [
        (row.jobs, row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.device_s)
        for row in found.rows()
    ]
    return every[0] if every else (0, 0, 0, 0, 0.0)


def commit(queue: Queue, job: PulledJob, used: JobUsage | None = USED, **options: Any) -> str:
    body = result_json(job.job_id)
    return queue.run(
        transitions.commit(queue.name, job.job_id, job.token, "succeeded", body, used=used, **options)
    )


def test_a_commit_counts_once_however_often_it_is_sent(queue: Queue) -> None:
    queue.submit("a", tenant="acme")
    job = queue.pull_one()
    assert [commit(queue, job) for _ in range(3)] == ["committed", "already_done", "already_done"]
    (row,) = rows(queue)
    assert (row.tenant, row.model, row.api_key) == ("acme", "m", "")
    assert sums(queue) == (1, 10, 4, 3, 0.25)


def test_a_takeover_counts_once(queue: Queue) -> None:
    queue.submit("a")
    first = queue.pull_one()
    queue.checkpoint(first, delta(0, 7, 8))
    queue.lapse("a")
    second = queue.pull_one(worker="w2")
    assert commit(queue, first, replace(USED, prompt_tokens=99)) == "fenced"
    assert sums(queue) == (0, 0, 0, 0, 0.0)
    assert commit(queue, second) == "committed"
    assert commit(queue, first) == "fenced"
    assert sums(queue) == (1, 10, 4, 3, 0.25)


@pytest.mark.parametrize("state", ["failed", "cancelled", "expired"])
def test_every_end_by_a_worker_counts(queue: Queue, state: Any) -> None:
    queue.submit("a")
    job = queue.pull_one()
    call = transitions.commit(queue.name, "a", job.token, state, error_json=error_json(), used=USED)
    assert queue.run(call) == "committed"
    assert sums(queue) == (1, 10, 4, 3, 0.25)


@pytest.mark.parametrize(
    "used",
    [
        f"{10**9} 0 5 0", f"1 0 {10**9} 0", f"1 0 1 {10**12}", "9" * 57 + " 0 0 0", "5 6 1 0", "5 0 1 0 ", "-5 0 5 0",
        "1.5 0 1 0", "1e9 0 1 0", "5 0 1 0" + " " * 60,
    ],
)  # fmt: skip
def test_figures_that_cannot_be_true_are_not_counted(queue: Queue, used: str) -> None:
    queue.submit("a")
    job = queue.pull_one()
    call = transitions.commit(queue.name, "a", job.token, "succeeded", result_json("a"), progress=DECODE)
    assert queue.run(replace(call, args=(*call.args[:-1], used))) == "committed"
    assert sums(queue) == (1, DECODE.prompt_tokens_done, 0, DECODE.generated_tokens, 0.0)


def test_progress_that_cannot_be_true_is_counted_up_to_the_limits(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    absurd = dict.fromkeys(("prompt_tokens_done", "prompt_tokens", "generated_tokens"), 10**30)
    progress = DECODE.model_copy(update=absurd)
    call = transitions.commit(queue.name, "a", job.token, "succeeded", result_json("a"), progress=progress)
    assert queue.run(call) == "committed"
    assert sums(queue) == (1, 10**8, 0, 10**8, 0.0)


def test_an_end_that_was_asked_for_counts_what_the_commit_says(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    queue.cancel("a")
    assert commit(queue, job) == "cancelled"
    assert sums(queue) == (1, 10, 4, 3, 0.25)


def test_attempts_before_the_last_are_not_counted(queue: Queue) -> None:
    queue.submit("a", max_attempts=2)
    retry = {"used": USED}
    assert queue.retry(queue.pull_one(), **retry) == "retrying"
    assert sums(queue) == (0, 0, 0, 0, 0.0)
    queue.make_due("a")
    assert queue.retry(queue.pull_one(), **retry) == "dead"
    assert sums(queue) == (1, 10, 4, 3, 0.25)


def test_an_end_without_a_worker_counts_what_the_status_shows(queue: Queue) -> None:
    queue.submit("never ran".replace(" ", "-"), "lost")
    queue.cancel("never-ran")
    assert sums(queue) == (1, 0, 0, 0, 0.0)
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 7, 8), progress=DECODE)
    queue.cancel("lost")
    queue.lapse("lost")
    queue.sweep()
    assert queue.state("lost") == "cancelled"
    assert sums(queue) == (2, 4, 0, 2, 0.0)


def test_a_worker_that_says_nothing_is_counted_by_its_last_progress(queue: Queue) -> None:
    queue.submit("a")
    commit(queue, queue.pull_one(), None, progress=DECODE)
    assert sums(queue) == (1, 4, 0, 2, 0.0)


def test_a_follower_is_a_job_without_tokens(queue: Queue) -> None:
    queue.submit("a", "b", temperature=0.0, dedupe=True)
    commit(queue, queue.pull_one())
    assert queue.state("b") == "succeeded"
    assert sums(queue) == (2, 10, 4, 3, 0.25)


def test_a_job_that_names_a_revision_is_in_its_models_row(queue: Queue) -> None:
    queue.submit("pinned", revision="r1")
    commit(queue, queue.pull_one(models=("m", "m~r1")))
    queue.submit("free")
    commit(queue, queue.pull_one())
    (row,) = rows(queue)
    assert (row.model, row.jobs) == ("m", 2)


def test_rows_are_by_tenant_model_and_key(queue: Queue) -> None:
    job = Job.parse({"prompt": "hello", "model": "m", "tenant": "acme"})
    items = [submissions.prepare(job, job_id).under(name) for job_id, name in [("a", "web"), ("b", "app")]]
    queue.run(submissions.submit(queue.name, items))
    queue.submit("c", tenant="acme", adapter="fr")
    queue.submit("d", tenant="beta")
    for pulled in queue.pull(models=("m", "m#fr")):
        commit(queue, pulled)
    assert [(r.tenant, r.model, r.api_key) for r in rows(queue)] == [
        ("acme", "m", "app"),
        ("acme", "m", "web"),
        ("acme", "m#fr", ""),
        ("beta", "m", ""),
    ]

    def summed(**options: Any) -> list[tuple[str, str, int]]:
        found = UsageSums(UsageFilter(**options))
        found.add(rows(queue))
        return [(row.tenant, row.model, row.jobs) for row in found.rows()]

    assert summed(by=("tenant",)) == [("acme", "", 3), ("beta", "", 1)]
    assert summed(by=("model",), model="m") == [("", "m", 3), ("", "m#fr", 1)]
    assert summed(by=("model",), tenant="acme", model="m#fr") == [("", "m#fr", 1)]
    with pytest.raises(InvalidJob):
        UsageSums(UsageFilter(by=("state",)))


def test_a_day_has_so_many_rows_and_the_rest_in_one(queue: Queue) -> None:
    """The rows of the day are generated, up to one less than the limit; then three tenants arrive."""
    queue.submit("first", tenant="first")
    commit(queue, queue.pull_one())
    assert len(rows(queue)) == 1
    (day,) = queue.client.zrange(f"{queue.prefix}usage", 0, -1)
    key = f"{queue.prefix}usage:{day.decode()}"
    queue.client.hset(key, mapping={f"t{n}:m": "1 1 0 1 1" for n in range(4094)})
    assert queue.client.hlen(key) == 4095
    for tenant in ("a", "b", "c", "a"):
        queue.submit(f"job-{queue.client.incr('n')}", tenant=tenant)
        commit(queue, queue.pull_one())
        assert rows(queue)
    assert queue.client.hlen(key) == 4097
    by_tenant = {row.tenant: row for row in rows(queue)}
    assert by_tenant["a"].jobs == 2
    assert (by_tenant["*"].jobs, by_tenant["*"].model, by_tenant["*"].prompt_tokens) == (2, "*", 20)
    assert sum(row.jobs for row in by_tenant.values()) == 1 + 4094 + 4


@pytest.mark.slow
def test_the_oldest_days_are_dropped(queue: Queue) -> None:
    """Rows that are over 400 days old at the start of a day, and rows in excess of 100,000."""
    queue.submit("a")
    commit(queue, queue.pull_one())
    assert len(rows(queue)) == 1
    (today,) = (int(day) for day in queue.client.zrange(f"{queue.prefix}usage", 0, -1))
    queue.client.delete(f"{queue.prefix}usage:{today}")

    def put(day: int, count: int) -> None:
        queue.client.zadd(f"{queue.prefix}usage", {str(day): day})
        mapping = {f"t{n}:m": "1 1 0 1 1" for n in range(count)}
        queue.client.hset(f"{queue.prefix}usage:{day}", mapping=mapping)

    for day, count in [(today - 400, 1), (today - 399, 1), (today - 2, 60_000), (today - 1, 39_999)]:
        put(day, count)
    queue.submit("b")
    commit(queue, queue.pull_one())
    assert len(rows(queue)) == 100_000
    left = [int(day) for day in queue.client.zrange(f"{queue.prefix}usage", 0, -1)]
    assert left == [today - 2, today - 1, today]
    assert f"usage:{today - 399}" not in queue.names(), "older ones expire by themselves"
    assert 399 * 86_400 < queue.client.ttl(f"{queue.prefix}usage:{today}") <= 400 * 86_400


def test_a_tenant_is_erased(queue: Queue) -> None:
    queue.submit("a", tenant="acme")
    queue.submit("b", tenant="acme2")
    for job in queue.pull():
        commit(queue, job)
    (today,) = queue.run(usage.days(queue.name))
    assert queue.run(usage.erase(queue.name, "acme", today - timedelta(days=1))) == 0
    assert queue.run(usage.erase(queue.name, "acme", today)) == 1
    assert [row.tenant for row in rows(queue)] == ["acme2"]
    assert queue.run(usage.erase(queue.name, "acme", today)) == 0
    with pytest.raises(InvalidJob):
        usage.erase(queue.name, "*", today)


def test_one_script_of_an_erasure_looks_at_one_day(queue: Queue) -> None:
    """A ledger has up to 100,000 rows: deleting all of them together would stop the server."""
    day = queue.client.time()[0] // 86_400
    for number in range(30):
        queue.client.zadd(f"{queue.prefix}usage", {str(day - number): day - number})
        queue.client.hset(f"{queue.prefix}usage:{day - number}", mapping={"acme:m": "1 1 0 1 1"})
    queue.run(usage.days(queue.name))
    queue.client.config_resetstat()
    queue.run(usage.erase(queue.name, "acme", date(1970, 1, 1) + timedelta(days=day)))
    calls = {name: found["calls"] for name, found in queue.client.info("commandstats").items()}
    assert calls["cmdstat_hscan"] == 1
    with Producer(queue.url, queue=queue.name) as producer:
        report = producer.purge_tenant("acme", PurgeOptions(also=frozenset({"ledger"})))
    assert report.erased["ledger"] == 29
    assert rows(queue) == []


def test_the_ledger_outlives_the_results(queue: Queue) -> None:
    queue.submit("a")
    commit(queue, queue.pull_one())
    for name in queue.names():
        if not name.startswith("usage"):
            queue.client.delete(f"{queue.prefix}{name}")
    assert sums(queue) == (1, 10, 4, 3, 0.25)


def test_the_sums_of_today_are_told(queue: Queue) -> None:
    assert queue.run(usage.totals(queue.name)) == usage.UsageTotals()
    queue.submit("a", "b")
    for job in queue.pull():
        commit(queue, job)
    assert queue.run(usage.totals(queue.name)) == usage.UsageTotals(2, 20, 8, 6, 0.5)


def test_a_damaged_row_stops_no_end(queue: Queue) -> None:
    queue.submit("a", "b")
    first, second = queue.pull()
    commit(queue, first)
    assert len(rows(queue)) == 1
    (key,) = (name for name in queue.names() if name.startswith("usage:"))
    queue.client.hset(f"{queue.prefix}{key}", "default:m", "broken")
    queue.client.rpush(f"{queue.prefix}usage:new", "broken")
    assert commit(queue, second) == "committed"
    assert sums(queue) == (1, 10, 4, 3, 0.25)


def test_many_ends_are_counted_between_two_looks(queue: Queue) -> None:
    """More entries than the list of new ones keeps; yesterday's entries stay in yesterday's rows."""
    queue.submit(*(f"j{number}" for number in range(150)))
    for job in queue.pull(150):
        commit(queue, job)
    assert 0 < queue.client.llen(f"{queue.prefix}usage:new") < 64
    assert sums(queue)[:2] == (150, 1500)
    assert not queue.client.exists(f"{queue.prefix}usage:new")
    (day,) = queue.client.zrange(f"{queue.prefix}usage", 0, -1)
    queue.client.rpush(f"{queue.prefix}usage:new", f"{int(day) - 1} 5 0 5 5 default:m")
    assert [row.jobs for row in rows(queue)] == [1, 150]
