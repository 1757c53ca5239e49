"""Removing a tenant: the removed data, the kept data, and the findings of the proof."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagemill.producer.client.purge.report import PurgeOptions
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import batches, transitions
from pagemill.producer.wire.calls.metering import usage
from pagemill.producer.wire.schema.errors import QueueFull
from pagemill.producer.wire.schema.signing import split_payload
from pagemill.producer.wire.schema.templates import ParentOutput
from tests.producer.client.purge.planting import TENANTS, contents, everything, scene, traces
from tests.producer.driving import Queue, delta, result_json

FIRST, SECOND = TENANTS
NOW = PurgeOptions(wait_s=0.3, also=frozenset({"settings", "ledger"}))
SHARED = frozenset({
    "counts", "meta", "lanes", "overtaken", "started", "dead", "leases", "delayed", "retrying", "deadlines", "outbox",
    "awaited", "settling", "bexpiry", "ableases", "abopen", "fileuses", "stored", "turns", "weights",
    "backed", "batch", "bjobs", "bfeed", "suspects", "quotas", "usage", "parked",
    "runs", "did"
})  # fmt: skip


def producer(queue: Queue, store: Path | None = None) -> Producer:
    url = f"file://{store}" if store is not None else None
    return Producer(queue.url, queue=queue.name, store=url)


@pytest.mark.slow
def test_one_tenant_goes_and_another_stays(queue: Queue, tmp_path: Path) -> None:
    with scene(queue, tmp_path) as planted, producer(queue, planted.store) as operator:
        ours, theirs = planted.planted[FIRST], planted.planted[SECOND]
        queue.run(usage.days(queue.name))  # no stored end remains next to the ledger's rows
        before = everything(queue)
        assert traces(queue, {FIRST})
        seen = operator.purge_tenant(FIRST, PurgeOptions(dry_run=True))
        assert everything(queue) == before, "a dry run changes nothing"
        report = operator.purge_tenant(FIRST, NOW)
        assert report.remains == []
        assert report.is_proven
        assert report.forced == len(ours.running) == 1
        assert {state: report.jobs[state] for state in seen.jobs} == seen.jobs
        assert (report.files, report.api_batches) == (seen.files, seen.api_batches)
        assert report.files >= 3
        assert report.stored_files >= 3
        assert traces(queue, ours.ids | {FIRST}) == []
        after = everything(queue)
        for name, items in before.items():
            kind = name.partition(":")[0]
            if kind not in SHARED and _is_theirs(name, items, theirs.ids):
                assert after.get(name) == items, name
            elif kind in SHARED and items:
                lost = set(items) - set(after.get(name, []))
                kept = {item for item in lost if any(word.encode() in item for word in theirs.ids | {SECOND})}
                assert not kept, (name, kept)
        left = planted.stored_files()
        assert not [name for name in left if any(job in name for job in ours.ids)]
        assert [name for name in left if any(job in name for job in theirs.ids)]


def _is_theirs(name: str, items: list[bytes], ids: set[str]) -> bool:
    text = b" ".join([name.encode(), *items])
    return SECOND.encode() in text or any(job.encode() in text for job in ids)


def test_late_writes_of_a_purged_job_are_refused(queue: Queue) -> None:
    queue.submit("runs", tenant=FIRST, stream=True)
    pulled = queue.pull_one()
    queue.checkpoint(pulled, delta(0, 1))
    with producer(queue) as operator:
        assert operator.purge_tenant(FIRST, NOW).forced == 1
    before = everything(queue)
    assert queue.checkpoint(pulled, delta(1, 2)) == "stale"
    assert queue.commit(pulled) == "fenced"
    assert queue.retry(pulled) == "fenced"
    assert queue.release(pulled) == "fenced"
    held = [(pulled.job_id, pulled.token)]
    assert queue.run(transitions.renew(queue.name, "w1", held)).lost == ["runs"]
    assert everything(queue) == before


def test_a_running_job_is_asked_to_end_and_waited_for(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit("runs", tenant=FIRST)
    pulled = queue.pull_one()
    said: list[str] = []

    with producer(queue) as operator:

        def end_it(progress: object) -> None:
            phase = getattr(progress, "phase", "")
            if phase == "wait" and "wait" not in said:
                said.append(phase)
                call = transitions.commit(
                    queue.name, "runs", pulled.token, "succeeded", result_json=result_json("runs")
                )
                assert queue.run(call) == "cancelled"

        options = PurgeOptions(wait_s=60, also=frozenset({"ledger"}))
        report = operator.purge_tenant(FIRST, options, on_progress=end_it)
    assert said == ["wait"]
    assert report.forced == 0
    assert report.is_proven
    assert traces(queue, {FIRST, "runs"}) == []


@pytest.mark.parametrize(
    "plant",
    [
        lambda queue, job: queue.client.set(f"{queue.prefix}in:{job}", "x"),
        lambda queue, job: queue.client.zadd(f"{queue.prefix}outbox", {job: 1}),
        lambda queue, job: queue.client.hset(f"{queue.prefix}suspects", "w9", job),
        lambda queue, job: queue.client.set(f"{queue.prefix}whatever", f'{{"tenant":"{FIRST}"}}'),
        lambda queue, job: queue.client.xadd(f"{queue.prefix}log", {"who": job}),
        lambda queue, job: queue.client.hset(f"{queue.prefix}job:theirs", "leader", job),
        lambda queue, job: queue.client.zadd(f"{queue.prefix}turns:1:1:zz", {FIRST: 1, SECOND: 1}),
        lambda queue, job: queue.client.sadd(f"{queue.prefix}lanes", f"1:1:{FIRST}:m"),
        lambda queue, job: queue.client.set(f"{queue.prefix}file:f-1:0", f"for {FIRST}."),
        lambda queue, job: queue.client.zadd(f"{queue.prefix}stored", {f"s3://b/q-x/in/j-{job}.0123456789ab": 1}),
        lambda queue, job: queue.client.rpush(f"{queue.prefix}bfeed:other", job),
    ],
)  # fmt: skip
def test_what_is_left_fails_the_proof(
    valkey_queue: Queue, monkeypatch: pytest.MonkeyPatch, plant: object
) -> None:
    """The leftover appears when the proof starts, as if from a bug or an earlier version."""
    queue = valkey_queue
    queue.submit("a-job-of-theirs", tenant=FIRST)
    queue.submit("theirs", tenant=SECOND, prompt=f"about {FIRST}")
    with producer(queue) as operator:
        seen: list[str] = []

        def leave(progress: object) -> None:
            if getattr(progress, "phase", "") == "prove" and not seen:
                seen.append("prove")
                plant(queue, "a-job-of-theirs")  # type: ignore[operator]

        report = operator.purge_tenant(FIRST, NOW, on_progress=leave)
    assert seen
    assert len(report.remains) == 1, report.remains
    assert not report.is_proven
    assert report.remains[0].names in (FIRST, "a-job-of-theirs")


def test_others_may_write_the_name(valkey_queue: Queue) -> None:
    """A tenant's name can occur as a word in another tenant's texts, models, keys and batches."""
    queue = valkey_queue
    with producer(queue) as operator:
        queue.submit("mine", tenant=FIRST, model=FIRST)
        queue.submit(
            "theirs", tenant=SECOND, model=FIRST, prompt=FIRST, idempotency_key=FIRST, metadata={FIRST: FIRST}
        )
        queue.submit("row", tenant=SECOND, batch_id=FIRST)
        report = operator.purge_tenant(FIRST, NOW)
    assert report.remains == []
    assert queue.state("theirs") == queue.state("row") == "queued"


def test_outputs_of_jobs_that_are_forgotten_are_removed(valkey_queue: Queue) -> None:
    """A failed job's input is kept for a day, and so are its parents' outputs, regardless of the records."""
    queue = valkey_queue
    with producer(queue) as operator:
        for tenant in TENANTS:
            queue.submit(f"parent-{tenant}", tenant=tenant)
            queue.submit(f"child-{tenant}", tenant=tenant, prompt="{parent.text}", after=[f"parent-{tenant}"])
            queue.commit(queue.pull_one(), f"a text with the name {FIRST}")
            queue.fail(queue.pull_one())
            for name in (f"parent-{tenant}", f"child-{tenant}"):
                queue.client.delete(*(f"{queue.prefix}{kind}:{name}" for kind in ("job", "in", "out")))
        report = operator.purge_tenant(FIRST, NOW)
    assert report.remains == []
    (output,) = (name for name in queue.names() if name.startswith("end:"))
    assert output.startswith(f"end:{SECOND}:parent-{SECOND}:")


def test_a_shared_batch_keeps_no_id_of_a_duplicate_that_went_with_its_primary_job(
    valkey_queue: Queue,
) -> None:
    """The primary job is first in the batch: its removal removes its duplicates, before their positions are reached."""
    queue = valkey_queue
    queue.submit("first", "second", "third", tenant=FIRST, batch_id="b", dedupe=True, seed=1)
    queue.submit("theirs", tenant=SECOND, batch_id="b")
    with producer(queue) as operator:
        operator.purge_tenant(FIRST, NOW)
    assert queue.client.lrange(f"{queue.prefix}bjobs:b", 0, -1) == [b"", b"", b"", b"theirs"]


def test_a_shared_batch_keeps_no_id_of_an_acknowledged_job_with_a_webhook(valkey_queue: Queue) -> None:
    """Its record exists until the webhook is delivered."""
    queue = valkey_queue
    queue.submit("ours", tenant=FIRST, batch_id="b", webhook="https://example.com/hook")
    queue.submit("theirs", tenant=SECOND, batch_id="b")
    for job in queue.pull():
        queue.commit(job)
    queue.run(batches.ack(queue.name, "b", "s2", 0))
    with producer(queue) as operator:
        assert operator.purge_tenant(FIRST, NOW).remains == []


def test_ids_that_a_reader_has_freed_stay_known(valkey_queue: Queue) -> None:
    """An acknowledged job does not have a record and may belong to another tenant: its id keeps its position."""
    queue = valkey_queue
    queue.submit("theirs", tenant=SECOND, batch_id="b")
    queue.commit(queue.pull_one())
    queue.run(batches.ack(queue.name, "b", "s1", 0))
    queue.submit("ours", tenant=FIRST, batch_id="b")
    with producer(queue) as operator:
        operator.purge_tenant(FIRST, NOW)
    assert queue.client.lrange(f"{queue.prefix}bjobs:b", 0, -1) == [b"theirs", b""]


@pytest.mark.parametrize("told", ["together", "later"])
def test_children_of_an_invalid_row_keep_their_outputs_when_another_tenant_goes(
    valkey_queue: Queue, told: str
) -> None:
    """A row of a batch that is not a job may be a parent of jobs of several tenants."""
    queue = valkey_queue
    with producer(queue) as operator:
        batch = operator.submit_many([{"prompt": "", "model": "m", "key": "bad"}], batch_id="b")
        (row,) = (item.id for item in batch.results())
        for tenant in (FIRST, SECOND):
            options = {"prompt": "{row.text}", "after": {"row": row}, "on_parent_failure": "run"}
            queue.submit(f"child-{tenant}", tenant=tenant, batch_id="b", **options)
            if told == "later":
                queue.client.delete(f"{queue.prefix}output:{row}")
        operator.purge_tenant(FIRST, NOW)
    (child,) = queue.pull()
    (line,) = split_payload(child.payload).outputs
    assert ParentOutput.model_validate_json(line).state == "failed"


def test_submits_wait_for_the_end_of_a_purge(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit("old", tenant=FIRST)
    with producer(queue) as operator, Producer(queue.url, queue=queue.name, tenant=FIRST) as client:
        refused: list[str] = []

        def submit(progress: object) -> None:
            if getattr(progress, "phase", "") == "prove":
                with pytest.raises(QueueFull, match="removed") as error:
                    client.submit(prompt="x", model="m")
                refused.append(str(error.value))
                assert queue.submit(f"theirs{len(refused)}", tenant=SECOND) == ["created"]

        report = operator.purge_tenant(FIRST, NOW, on_progress=submit)
        assert refused
        assert report.is_proven
        client.submit(prompt="x", model="m")


def test_a_tenant_without_anything_is_gone(valkey_queue: Queue) -> None:
    with producer(valkey_queue) as operator:
        report = operator.purge_tenant("nobody")
    assert report.is_proven
    assert report.jobs == {}
    assert contents(valkey_queue, "meta") == []


_KILLED = """
import sys
from pagemill.producer.client.purge.report import PurgeOptions
from pagemill.producer.client.sync import Producer

def tell(progress):
    if progress.phase == "jobs" and progress.done > 300:
        print("now", flush=True)
        sys.stdin.read()

with Producer(sys.argv[1], queue=sys.argv[2]) as producer:
    producer.purge_tenant(sys.argv[3], PurgeOptions(wait_s=0), on_progress=tell)
"""


def _fill(queue: Queue, jobs: int) -> None:
    with Producer(queue.url, queue=queue.name, tenant=FIRST, model="m") as client:
        client.submit_many(({"prompt": f"p{n}"} for n in range(jobs)), batch_id=f"all.{FIRST}")
    queue.submit("theirs", tenant=SECOND)


def _killed_in_the_middle(queue: Queue) -> None:
    arguments = [sys.executable, "-c", _KILLED, queue.url, queue.name, FIRST]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        process.kill()


@pytest.mark.slow
def test_a_killed_purge_is_run_again(valkey_queue: Queue) -> None:
    queue = valkey_queue
    _fill(queue, 1000)
    _killed_in_the_middle(queue)
    assert traces(queue, {FIRST})
    assert queue.submit("more", tenant=FIRST) == ["purging"]
    with producer(queue) as operator:
        report = operator.purge_tenant(FIRST, NOW)
    assert report.is_proven
    assert 0 < sum(report.jobs.values()) < 1000
    assert traces(queue, {FIRST}) == []
    assert queue.state("theirs") == "queued"


@pytest.mark.slow
def test_a_hundred_thousand_jobs_go(own_queue: Queue) -> None:
    queue = own_queue
    _fill(queue, 100_000)
    with producer(queue) as operator:
        report = operator.purge_tenant(FIRST, NOW)
    assert report.is_proven
    assert report.jobs == {"queued": 100_000}
    assert traces(queue, {FIRST}) == []
