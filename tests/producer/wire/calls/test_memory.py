"""A server that runs out of memory: early rejections, calls that still pass, and preserved results."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagemill import Producer, QueueFull
from pagemill.producer.wire.calls import limits, memory, reads, registry, stored, transitions
from pagemill.producer.wire.calls.gateway import stored_files
from pagemill.producer.wire.calls.gateway.stored_files import StoredFile
from pagemill.producer.wire.calls.memory import MemoryUse
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.signing import split_payload
from tests.producer.driving import Queue, delta
from tests.producer.scripted_worker import scripted_worker
from tests.producer.small_server import MOST, PROMPT, flood, small_server

LARGE = 100_000


@pytest.fixture(params=["valkey-server", "redis-server"])
def small_queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    """A queue on a server of 30 MB, Valkey and Redis 6.2."""
    with small_server(tmp_path, request.param) as queue:
        yield queue


def use(queue: Queue) -> MemoryUse:
    return registry.stats(queue.run, queue.name).memory


def recheck(queue: Queue) -> None:
    """Make the next submit check the server's memory, as it does a second after the last check."""
    queue.client.hdel(f"{queue.prefix}meta", "memory_at", "memory_looked")


def test_submits_are_refused_before_the_server_refuses_them(small_queue: Queue) -> None:
    queue = small_queue
    taken = flood(queue)
    seen = use(queue)
    assert seen.most == MOST
    assert 0.75 * MOST < seen.used < 0.95 * MOST
    assert seen.is_near
    assert seen.refused > 0
    stats = registry.stats(queue.run, queue.name)
    assert stats.counts == {"queued": len(taken)}
    assert queue.submit(taken[0], prompt=PROMPT) == ["exists"], "what is there is not refused"


def test_a_share_of_the_queues_own(small_queue: Queue) -> None:
    queue = small_queue
    queue.run(limits.set_limits("q", limits.QueueLimits(memory_share=0.5)))
    flood(queue)
    assert 0.4 * MOST < use(queue).used < 0.6 * MOST
    queue.run(limits.set_limits("q", limits.QueueLimits(memory_share=0.7)))
    assert queue.submit("now", prompt=PROMPT) == ["created"], "a new limit holds at once"
    with pytest.raises(InvalidJob, match="memory_share"):
        limits.set_limits("q", limits.QueueLimits(memory_share=0.05))


def test_running_jobs_end_and_then_submits_go_on(small_queue: Queue) -> None:
    queue = small_queue
    queue.submit(*(f"run-{i}" for i in range(40)))
    running = queue.pull(40)
    taken = flood(queue)
    for job in running:
        for step in range(10):
            assert queue.checkpoint(job, delta(step, step, text="y" * 2000)) == "ok"
    assert [queue.commit(job, "y" * 20_000) for job in running] == ["committed"] * 40
    ended = 0
    while jobs := queue.pull(50):
        assert [queue.commit(job, job.job_id) for job in jobs] == ["committed"] * len(jobs)
        ended += len(jobs)
    assert ended == len(taken), "nothing that was taken is lost"
    recheck(queue)
    assert queue.submit("later", prompt=PROMPT) == ["created"]


def test_at_maxmemory_itself_running_jobs_end(small_queue: Queue) -> None:
    """Other software on the server may use all of it."""
    queue = small_queue
    queue.submit(*"abc")
    a, b, c = queue.pull()
    queue.client.config_set("maxmemory", 1)
    with pytest.raises(QueueFull) as full, Producer(queue.url, queue="q") as producer:
        producer.submit(prompt="p", model="m")
    assert full.value.reason == "memory"
    info = registry.WorkerInfo(id="w1", models=("m",))
    queue.run(registry.heartbeat("q", info))
    assert [worker.id for worker in queue.run(registry.workers("q"))] == ["w1"]
    assert queue.run(stored.announce("q", ["file:///x"]))
    assert queue.checkpoint(a, delta(0, 1)) == "ok"
    assert queue.commit(a) == "committed"
    assert queue.retry(b) == "retrying"
    assert queue.release(c) == "released"
    assert queue.run(transitions.sweep("q")).memory == "full"
    assert "batch:b" not in queue.names()
    queue.client.config_set("maxmemory", 0)
    recheck(queue)
    assert queue.submit("d") == ["created"]


@pytest.mark.slow
def test_a_wait_for_room_ends_when_there_is_room(small_queue: Queue) -> None:
    queue = small_queue
    flood(queue)
    with Producer(queue.url, queue="q") as producer:
        with pytest.raises(QueueFull, match="near its maxmemory") as full:
            producer.submit(prompt=PROMPT, model="m")
        assert full.value.reason == "memory"
        assert full.value.lane == ("normal", "default", "m")
        jobs = [{"prompt": PROMPT, "model": "m"} for _ in range(1000)]
        with scripted_worker(queue.url, "q", run=lambda queue, job: queue.commit(job) and None):
            batch = producer.submit_many(jobs)
            assert batch.wait().succeeded == 1000


def large_result(queue: Queue, job_id: str, size: int = LARGE, age_s: float = 700, **fields: object) -> None:
    batch_id = fields.pop("batch_id", None)
    queue.submit(job_id, batch_id=batch_id, **fields)  # type: ignore[arg-type]
    (job,) = queue.pull(1)
    queue.commit(job, "y" * size)
    finished = queue.client.time()[0] * 1000 - int(1000 * age_s)
    queue.client.hset(f"{queue.prefix}job:{job_id}", "finished_at", finished)


def press(queue: Queue, share: float) -> None:
    """Set maxmemory so that this share of it is in use."""
    queue.client.config_set("maxmemory", int(use(queue).used / share))


def test_results_are_kept_while_memory_is_short(small_queue: Queue) -> None:
    queue = small_queue
    large_result(queue, "old")
    large_result(queue, "young", age_s=0)
    large_result(queue, "in-batch", batch_id="b")
    assert queue.run(transitions.sweep("q")).memory == "ok"
    for share, level in ((0.8, "near"), (0.9, "full"), (1.1, "full")):
        press(queue, share)
        assert use(queue).is_near
        assert queue.run(transitions.sweep("q")).memory == level
    for job_id in ("old", "young", "in-batch"):
        result = queue.run(reads.outcome("q", job_id)).result
        assert result is not None
        assert len(result.text) == LARGE


def test_uploads_are_refused_and_outputs_of_batches_are_not(small_queue: Queue) -> None:
    queue = small_queue
    flood(queue)

    def begin(purpose: str) -> bool:
        file = StoredFile(f"f-{purpose}", 0.0, 10_000_000, 40, "name", purpose, 0)
        return queue.run(stored_files.begin("q", "t", file, max_files=9, max_bytes=1 << 40))

    with pytest.raises(QueueFull, match="maxmemory"):
        begin("batch")
    assert begin("batch_output")


def payloads(queue: Queue) -> None:
    queue.submit(*(f"j{i}" for i in range(100)), prompt=PROMPT)


def kept_results(queue: Queue) -> None:
    for i in range(30):
        large_result(queue, f"j{i}")


def checkpoints(queue: Queue) -> None:
    queue.submit(*(f"j{i}" for i in range(30)))
    for job in queue.pull(30):
        queue.checkpoint(job, delta(0, 1, text="y" * LARGE))


@pytest.mark.slow
@pytest.mark.parametrize("binary", ["valkey-server", "redis-server"])
@pytest.mark.parametrize(("number", "most"), [(1_000, MOST), (4_000, 150_000_000)])
def test_children_share_a_large_output(number: int, most: int, binary: str, tmp_path: Path) -> None:
    """Jobs that need one output of 200 kB; one copy per job would exceed five times the server's memory."""
    text = "y" * 200_000
    with small_server(tmp_path, binary, most) as queue:
        queue.submit("parent")
        for start in range(0, number, 500):
            ids = [f"child-{i}" for i in range(start, start + 500)]
            queue.submit(*ids, prompt="{parent.text}", after=["parent"])
        (parent,) = queue.pull()
        before = use(queue).used
        assert queue.commit(parent, text) == "committed"
        queue.client.delete(f"{queue.prefix}job:parent", f"{queue.prefix}out:parent")
        ended: set[str] = set()
        while len(ended) < number:
            jobs = queue.pull(50)
            assert use(queue).used < before + 2_000_000 + 1_500 * number
            assert queue.submit(f"other-{len(ended)}", tenant="other", model="n") == ["created"]
            for job in jobs:
                (output,) = split_payload(job.payload).outputs
                assert json.loads(output) == {"id": "parent", "state": "succeeded", "text": text}
                assert queue.commit(job) == "committed"
                ended.add(job.job_id)
        assert registry.stats(queue.run, queue.name).counts["succeeded"] == number + 1
        kinds = Counter(name.partition(":")[0] for name in queue.names() if ":other-" not in name)
        assert kinds.keys().isdisjoint(("end", "sharers", "output", "children", "in"))


def letters(queue: Queue) -> None:
    queue.submit(*(f"j{i}" for i in range(100)), prompt=PROMPT)
    for _ in range(2):
        for job in queue.pull(50):
            queue.fail(job, "dead")


def files(queue: Queue) -> None:
    for i in range(40):
        file = StoredFile(f"f{i}", 0.0, 100_000, 1, "f.jsonl", "batch", 0)
        assert queue.run(stored_files.begin("q", "default", file, max_files=40, max_bytes=10**7))
        queue.run(stored_files.write("q", "default", file.id, 0, b"z" * file.size))


def foreign(queue: Queue) -> None:
    for i in range(40):
        queue.client.set(f"other-{i}", "z" * 100_000)


@pytest.mark.parametrize(
    ("fill", "kind"),
    [
        (payloads, "payloads"), (kept_results, "results"), (checkpoints, "checkpoints"),
        (letters, "dead_letters"), (files, "files"), (foreign, "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_which_kind_of_data_holds_the_memory(
    small_queue: Queue, fill: Callable[[Queue], None], kind: str
) -> None:
    queue = small_queue
    assert memory.shares(queue.run, "q") == {}
    fill(queue)
    shares = memory.shares(queue.run, "q")
    assert sum(shares.values()) == pytest.approx(1.0)
    assert memory.largest(shares) == kind
