"""A modified or truncated record is an error of its own job; the others are listed, read and delivered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagemill import Producer
from pagemill.producer.wire.calls import batches, job_lists, outbox, reads
from pagemill.producer.wire.calls.submissions import prepare, submit
from pagemill.producer.wire.schema.errors import InvalidJob, JobError
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue

URL = "https://example.com/x"
EDITS: dict[str, tuple[str, str | bytes]] = {
    "state": ("state", "zzz"),
    "submission time": ("at", "zz"),
    "end time": ("finished_at", "1e"),
    "priority and model": ("lane", "zz"),
    "attempts": ("attempt", "x"),
    "progress": ("progress", "decode 1 2"),
    "not UTF-8": ("worker", b"\xff\xfe"),
}
RESULTS: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda text: text[:-5],
    "not JSON": lambda _: b"\xff",
    "a list": lambda _: b"[]",
    "an empty object": lambda _: b"{}",
}


def _code(call: Callable[[], object]) -> str | None:
    """Return the code of the error that a call raises."""
    try:
        call()
    except (InvalidJob, JobError) as error:
        return error.code
    return None


def _listed(queue: Queue) -> set[str]:
    place, found = "0", set()
    while True:
        page = queue.run(job_lists.listed(queue.name, "all", place, job_lists.JobFilter()))
        found |= {line.id for line in page.jobs}
        place = page.place
        if place in ("", "0"):
            return found


@pytest.mark.parametrize("edit", EDITS)
def test_a_damaged_record_hides_no_other_job(queue: Queue, edit: str) -> None:
    name, value = EDITS[edit]
    queue.submit("a", "b", "c", batch_id="B", webhook="https://example.com/x")
    for job in queue.pull():
        queue.commit(job, "text")
    queue.client.hset(f"{queue.prefix}job:b", name, value)
    assert {"a", "c"} <= _listed(queue)
    with Producer(queue.url, queue=queue.name) as producer:
        if name != "lane":  # without it, the server's own script cannot locate the key
            codes = {_code(producer.job("b").status), _code(producer.job("b").result)}
            assert codes <= {None, "payload_lost"}
        items = {item.id: item for item in producer.batch("B").results(timeout=10)}
        assert {"a", "c"} <= {job_id for job_id, item in items.items() if item.result is not None}
    told = {notice.outcome.job_id for notice in queue.run(outbox.claim(queue.name, 10, 1000))}
    assert {"a", "c"} <= told
    assert queue.run(reads.recorded(queue.name, "a")).outcome is not None
    queue.run(reads.recorded(queue.name, "b"))


@pytest.mark.parametrize("edit", RESULTS)
def test_a_damaged_result_is_an_error_of_its_job(queue: Queue, edit: str) -> None:
    jobs = [Job.parse({"prompt": "x", "model": "m", "key": f"row-{name}", "webhook": URL}) for name in "ab"]
    queue.run(submit(queue.name, [prepare(*pair) for pair in zip(jobs, "ab", strict=True)], batch_id="B"))
    for job in queue.pull():
        queue.commit(job, "text")
    key = f"{queue.prefix}out:b"
    queue.client.set(key, RESULTS[edit](queue.client.get(key)), keepttl=True)
    with Producer(queue.url, queue=queue.name) as producer:
        with pytest.raises(InvalidJob) as damaged:
            producer.job("b").result(timeout=10)
        assert damaged.value.code == "payload_lost"
        items = {item.id: item for item in producer.batch("B").results(timeout=10)}
        assert items["a"].result is not None
        assert items["b"].error is not None
        assert items["b"].error.code == "payload_lost"
        assert (items["a"].key, items["b"].key) == ("row-a", "row-b")
    outcomes = {n.outcome.job_id: n.outcome for n in queue.run(outbox.claim(queue.name, 10, 1000))}
    assert outcomes["a"].result is not None
    assert (outcomes["b"].result, outcomes["b"].error is None) == (None, False)
    page = queue.run(batches.page(queue.name, "B", 0, ordered=True))
    assert len(page.items) == 2
