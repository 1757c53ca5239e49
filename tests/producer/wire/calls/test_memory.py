"""A server that runs out of memory: what is refused before, what still passes, and what is let go of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pagemill import Producer, QueueFull, ResultExpired
from pagemill.producer.wire.calls import limits, memory, reads, registry, rollouts, stored, transitions
from pagemill.producer.wire.calls.gateway import stored_files
from pagemill.producer.wire.calls.gateway.stored_files import StoredFile
from pagemill.producer.wire.calls.memory import MemoryUse
from pagemill.producer.wire.schema.errors import InvalidJob
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


def look_again(queue: Queue) -> None:
    """Have the next submit look at the server's memory, as it does a second after the last look."""
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
    look_again(queue)
    assert queue.submit("later", prompt=PROMPT) == ["created"]


def test_at_maxmemory_itself_running_jobs_end(small_queue: Queue) -> None:
    """Other software on the server may take all of it."""
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
    look_again(queue)
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


def results(queue: Queue) -> set[str]:
    return {name.removeprefix("out:") for name in queue.names() if name.startswith("out:")}


def press(queue: Queue, above: int) -> None:
    """Have the server's memory be `above` bytes more than where it lets go of results."""
    allowed = max(1000, use(queue).used - above)
    queue.client.config_set("maxmemory", int(allowed / (memory.DEFAULT_SHARE - memory.WARNING)))


def test_the_largest_results_go_first_and_only_what_is_needed(small_queue: Queue) -> None:
    queue = small_queue
    for i in range(6):
        large_result(queue, f"r{i}", LARGE + 100_000 * i)
    assert queue.run(transitions.sweep("q")).memory == "ok"
    press(queue, above=700_000)
    assert queue.run(transitions.sweep("q")).expired_results == 2
    assert results(queue) == {"r0", "r1", "r2", "r3"}
    assert queue.state("r5") == "succeeded", "the record stays"
    assert queue.run(reads.outcome("q", "r5")).result is None
    assert use(queue).expired == 2


def test_results_that_somebody_may_want_stay(small_queue: Queue) -> None:
    queue = small_queue
    large_result(queue, "batch", batch_id="b")
    large_result(queue, "notice", webhook="https://example.com/x")
    large_result(queue, "kept", keep_input=True)
    large_result(queue, "young", age_s=590)
    large_result(queue, "small", size=1000)
    large_result(queue, "old")
    press(queue, above=MOST)
    assert queue.run(transitions.sweep("q")).expired_results == 1
    assert results(queue) == {"batch", "notice", "kept", "young", "small"}
    queue.client.config_set("maxmemory", 0)
    queue.client.hset(f"{queue.prefix}job:young", "finished_at", 1)
    press(queue, above=MOST)
    assert queue.run(transitions.sweep("q")).expired_results == 1
    assert "young" not in results(queue)
    assert "large" not in queue.names()


def test_work_whose_result_was_removed_is_done_again_under_its_key(small_queue: Queue) -> None:
    queue = small_queue
    large_result(queue, "first", idempotency_key="k")
    assert queue.submit("other", idempotency_key="k") == ["same"]
    press(queue, above=MOST)
    assert queue.run(transitions.sweep("q")).expired_results == 1
    queue.client.config_set("maxmemory", 0)
    look_again(queue)
    with Producer(queue.url, queue="q") as producer:
        handle = producer.job("first")
        for read in (handle.result, lambda: list(handle.stream())):
            with pytest.raises(ResultExpired, match="submit the job again"):
                read()
    assert queue.submit("again", idempotency_key="k") == ["created"]
    assert queue.submit("twice", idempotency_key="k") == ["same"]


def test_a_job_that_needs_a_removed_result_says_what_to_do(small_queue: Queue) -> None:
    queue = small_queue
    large_result(queue, "parent")
    queue.submit("early", prompt="{p.text}", after={"p": "parent"})
    press(queue, above=MOST)
    queue.run(transitions.sweep("q"))
    queue.client.config_set("maxmemory", 0)
    look_again(queue)
    queue.submit("reads", prompt="{p.text}", after={"p": "parent"})
    queue.submit("waits", prompt="nothing of it", after={"p": "parent"})
    assert sorted(job.job_id for job in queue.pull()) == ["early", "waits"]
    error = queue.run(reads.outcome("q", "reads")).error
    assert error is not None
    assert error.code == "payload_lost"
    assert "job parent, whose result has been removed: submit that job again" in error.message


def test_what_a_comparison_needs_is_not_removed(small_queue: Queue) -> None:
    """The sides of a rollout are compared by results of the canary, and their inputs."""
    queue = small_queue
    info = registry.WorkerInfo(id="w1", models=("m",), revision="r2")
    queue.run(registry.heartbeat("q", info))
    assert queue.run(rollouts.start("q", "m", rollouts.Rollout("r2", 1.0))) == "ok"
    queue.submit("sampled")
    (job,) = queue.pull(1, models=("m", "m~r2"))
    queue.commit(job, "y" * LARGE)
    queue.client.hset(f"{queue.prefix}job:sampled", "finished_at", 1)
    press(queue, above=MOST)
    assert queue.run(transitions.sweep("q")).expired_results == 0
    assert queue.run(rollouts.sample("q", "m")) == ["sampled"]


def test_one_sweep_removes_a_bounded_number(small_queue: Queue) -> None:
    queue = small_queue
    for i in range(70):
        large_result(queue, f"r{i}", 20_000)
    press(queue, above=MOST)
    assert queue.run(transitions.sweep("q")).expired_results == 64
    assert queue.run(transitions.sweep("q")).expired_results == 6


def test_results_that_expired_by_themselves_are_forgotten(small_queue: Queue) -> None:
    queue = small_queue
    for i in range(3):
        large_result(queue, f"r{i}", 20_000)
        queue.client.delete(f"{queue.prefix}out:r{i}")
    for _ in range(20):
        queue.run(transitions.sweep("q"))
    assert "large" not in queue.names()


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
        (payloads, "payloads"),
        (kept_results, "results"),
        (checkpoints, "checkpoints"),
        (letters, "dead_letters"),
        (files, "files"),
        (foreign, "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_which_kind_of_data_holds_the_memory(
    small_queue: Queue, fill: Callable[[Queue], None], kind: str
) -> None:
    queue = small_queue
    assert memory.shares(queue.run, "q") == {}
    fill(queue)
    shares = memory.shares(queue.run, "q")
    assert sum(shares.values()) == pytest.approx(1.0)
    assert memory.largest(shares) == kind
